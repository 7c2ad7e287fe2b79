"""Faults to plant: what each does wrong, a text that stands in one place, and its substitute."""

from __future__ import annotations

Fault = tuple[tuple[str, str], ...]

MMA_FAULTS: dict[str, Fault] = {
    "waits for one stage too few": (("copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>"),),
    "reads a stage before all warps filled it": (("__syncthreads();  // the stage is full", "//"),),
    "fills the stage that is being read": (("load(block + STAGES - 1);", "load(block + STAGES);"),),
    "writes an addend over a stage in use": (("__syncthreads();            // all warps", "//"),),
    "adds what others have not copied": (("__syncthreads();  // the addends", "//"),),
    "adds what is on its way": (("copy_async_wait<0>();", ""),),
    "leaves out the last half of an addend": (("load(blocks + STAGES - 1);", ""),),
    "takes an addend for the other": (("tiles.half(2 * a +", "tiles.half(2 - 2 * a +"),),
    "takes the left half of an addend for both": (("number % 2 * HALF + chunk", "chunk"),),
    "rows of an addend are off": (("row + lane % 16, lane_chunk", "row + lane % 8, lane_chunk"),),
    "swaps neighbours of an addend": (("bits >> 16)});", "bits)});"),),
    "reads a tile that is not finished": (
        ("warp_col);\n    __syncthreads();\n    T* out", "warp_col);\n    T* out"),
    ),
    "counts padding behind the last column": (("min(max(depth - col, 0), CHUNK)", "CHUNK"),),
    "swaps halves of the left fragment": (("left_chunk = lane / 16;", "left_chunk = lane / 8 % 2;"),),
    "takes rows of right in lane order": (("lane % 8 + (lane / 16) * 8", "lane % 16"),),
    "mirror is off by a row": (("lane / 8 * 2 + lane % 2;", "lane / 8 * 2 + 1 - lane % 2;"),),
    "mirror is off by a chunk": (("lane % 4 * CHUNK;", "(lane + 1) % 4 * CHUNK;"),),
    "reads an addend transposed": (("row * batch.row_stride + col : 0", "col * batch.row_stride + row : 0"),),
    "keeps both halves of a diagonal tile": (("if (mirrored > row) continue;", ""),),
    "writes columns that do not exist": (("min(size - col, CHUNK)", "CHUNK"),),
    "takes a row that does not exist": (
        ("first_row + tile_row < size;", "first_row + tile_row < size + 8;"),
    ),
    "takes an address for aligned by its start": (("(start | step)", "start"),),
    "ignores live factors": (("factor.live ? *factor.live : factor.value", "factor.value"),),
    "every part begins with the first columns": (("min(blockIdx.x % p.parts * each, all)", "0"),),
    "parts lie in one place": (
        ("p.partial + static_cast<long long>(blockIdx.x) * FRAGMENTS * THREADS, sum", "p.partial, sum"),
    ),
    "adds the first part again": (("part + static_cast<long long>(i) * FRAGMENTS * THREADS", "part"),),
    "leaves out the last part": (("i < p.parts; ++i) add_part", "i < p.parts - 1; ++i) add_part"),),
    "fetches addends for a part": (("} else if (Does != PART) {", "} else {"),),
}

WGMMA_FAULTS: dict[str, Fault] = {
    "multiplies before a stage is filled": (
        ("barrier_wait(ring.filled(), ring.parity);\n        const u32 left", "const u32 left"),
    ),
    "fills a stage that is not emptied": (("barrier_wait(ring.emptied(), ring.parity ^ 1);", ""),),
    "releases the stage in use": (("if (block) release(previous);", "if (block) release(ring.emptied());"),),
    "releases a stage before its products are over": (("products_wait<1>()", "products_wait<2>()"),),
    "reads sums before their products are over": (("products_wait<0>()", "products_wait<1>()"),),
    "keeps the last stage of a tile": (("if (blocks) release(last);", ""),),
    "adds the square before": (("next / ACROSS * SQUARE, first_col", "half * SQUARE, first_col"),),
    "rows of an addend are off": (("from + i * LANE_ROWS * row_stride[a]", "from + i * row_stride[a]"),),
    "adds whole chunks only": (("if (all) return;", "return;"),),
    "swaps neighbours where a chunk is not whole": (("elements[2 * e] |", "elements[2 * e + 1] |"),),
    "one warp releases for its group": (
        (
            "if (threadIdx.x % WARP != 0) return;\n    barrier_arrive(emptied)",
            "if (threadIdx.x % GROUP != 0) return;\n    barrier_arrive(emptied)",
        ),
        ("CLUSTER * GROUP / WARP)", "CLUSTER)"),
    ),
    "parity never changes": (("slot = 0;\n            parity ^= 1;", "slot = 0;"),),
    "parity does not change where a turn of the ring is skipped": (("parity ^= slot / STAGES & 1;", ""),),
    "asks its own block alone before it fills both": (
        ("barrier_arrive_at(emptied, cluster_rank() ^ 1);", ""),
        ("CLUSTER * GROUP / WARP)", "GROUP / WARP)"),
    ),
    "does not tell the other block": (("barrier_arrive_at(emptied, cluster_rank() ^ 1);", ""),),
    "begins before the other block has barriers": (
        ("cluster_sync();  // what comes", "__syncthreads();  //"),
    ),
    "ends before the other block": (("cluster_sync();  // the other block may", "//"),),
    "both blocks copy the same half": (("column, row + rank * HALF, left.z", "column, row, left.z"),),
    "copies a shared half to one place": (("ring.stage() + rank * HALF_BYTES, left", "ring.stage(), left"),),
    "copies the halves of a tile to one place": (("ring.stage() + HALF_BYTES, left", "ring.stage(), left"),),
    "shares where tiles have nothing in common": (("if (tile.is_adjacent) {", "if (true) {"),),
    "copies for its own block what both need": (
        ("tensor_load_to_cluster<CLUSTER>(ring.stage() + rank * HALF_BYTES", "tensor_load(ring.stage()"),
    ),
    "a group does not wait for its turn": (("barrier_wait(turn, parity);", ""),),
    "a group gives no turn": (("pass_turn(other);\n        const int first_row", "const int first_row"),),
    "a group gives no turn after a tile behind the matrix": (
        ("pass_turn(other);\n            continue", "continue"),
    ),
    "the second group begins": (("u32 parity = group ^ 1;", "u32 parity = group;"),),
    "both groups take a tile": (("if (taken % CONSUMERS != group) {", "if (false) {"),),
    "pairs tiles that overlap": (("2 * (pair - row * row / 4) + rank", "pair - row * row / 4 + rank"),),
    "expects the bytes of left only": (("ring.filled(), STAGE_BYTES)", "ring.filled(), LEFT_BYTES)"),),
    "steps by elements where bytes are meant": (
        ("step * INSTRUCTION_DEPTH * 2", "step * INSTRUCTION_DEPTH"),
    ),
    "rows of the second instruction are off": (
        ("half * HALF_BYTES + column", "half * HALF_BYTES / 2 + column"),
    ),
    "wrong distance between groups of rows": (("SWIZZLE_GROUP_BYTES >> 4", "SWIZZLE_GROUP_BYTES >> 5"),),
    "no fence before products": (("products_begin();", ""),),
    "stores without a fence": (("fence_shared_for_copies();", ""),),
    "overwrites a square on its way": (("if (leader) tensor_stores_wait_read<0>();", ""),),
    "overwrites a square before the leader has waited": (
        ("named_barrier(1 + group, GROUP);  // the square", "// the square"),
    ),
    "stores a square that is not written": (
        (
            "fence_shared_for_copies();\n        named_barrier(1 + group, GROUP);",
            "fence_shared_for_copies();",
        ),
    ),
    "both groups use one barrier": (
        ("named_barrier(1 + group, GROUP);  // the square", "named_barrier(1, GROUP);  // the square"),
    ),
    "ends while a store reads": (("if (threadIdx.x % GROUP == 0) tensor_stores_wait_read<0>();", ""),),
    "mirror lies where the tile lies": (
        ("at + SQUARE_BYTES, row, col, out.z", "at + SQUARE_BYTES, col, row, out.z"),
    ),
    "mirror swaps upper and lower rows": (("warp * 2 + below), bits", "warp * 2 + 1 - below), bits"),),
    "keeps both halves of a diagonal square": (("if (col > row) continue;\n            const", "const"),),
    "takes a tile on the diagonal for the next one": (("4 * last + 2 * rank", "4 * last + rank"),),
    "takes more registers than there are": (("PRODUCER_REGISTERS = 40", "PRODUCER_REGISTERS = 72"),),
    "takes every matrix for the first": (("z(each ? 0 : z)", "z(0)"),),
}

GRAM_FAULTS: dict[str, Fault] = {
    "leaves out a low part": (("multiply_add_tf32(product[i][j], left_low[i], right_high[j]);", ""),),
    "waits for one stage too few": (("copy_async_wait<STAGES - 2>", "copy_async_wait<STAGES - 1>"),),
    "reads a stage before all threads filled it": (("__syncthreads();  // the slot is full", "//"),),
    "fills the slot that is being read": (("load(next, next % STAGES)", "load(next, block % STAGES)"),),
    "parts overlap": (("min(p.rows, start + part_rows)", "p.rows"),),
    "reads columns that do not exist": (("min(max(end_col - first_col - col, 0), CHUNK)", "CHUNK"),),
    "writes above the diagonal": (("if (r < p.cols && c <= r) gram", "if (r < p.cols && c < p.cols) gram"),),
    "works on every panel": (("if (!is_selected(p.selection, z)) return;\n    const Tile", "const Tile"),),
}

CHOLESKY_FAULTS: dict[str, Fault] = {
    "a round starts before the last one is over": (
        ("__syncthreads();\n        const float pivot", "const float pivot"),
    ),
    "takes what is not a number for a pivot": (("!(pivot > FLOAT32", "(pivot <= FLOAT32"),),
    "takes rounding for a pivot": (("FLOAT32_EPSILON * original)", "-1e30f)"),),
    "inverse has unscaled rows": (("inverse = own > 0.0f ? inverse / own : 0.0f;", ""),),
    "inverse is taken transposed": (
        ("w.inverse[col * TILE_PITCH + from + k]", "w.inverse[(from + k) * TILE_PITCH + col]"),
    ),
    "multiplies a tile that is not whole": (("__syncthreads();  // the tile is whole", "//"),),
    "reads a factor that is not written": (("__syncthreads();  // the factor is read", "//"),),
    "solves with an inverse that is not whole": (("__syncthreads();  // tile and inverse are whole", "//"),),
    "reads columns that are not solved": (("__syncthreads();  // these columns", "//"),),
    "takes the first part of the gram matrix only": (
        ("part < p.parts; ++part)\n            sum", "part < 1; ++part)\n            sum"),
    ),
    "ignores the shift": (("if (r == c) sum += shift * sum;", ""),),
    "a column that is left out keeps its row of the inverse": (
        ("inverse = own > 0.0f ? inverse / own : 0.0f;", "inverse /= own > 0.0f ? own : 1.0f;"),
    ),
    "a column that is left out takes its share": (("if (row <= k || is_left_out)", "if (row <= k)"),),
    "a column that is left out counts in the ratio": (("if (!(root > 0.0f)) continue;", ""),),
    "leaves out what is not a number": (("pivot <= left_out * original", "!(pivot > left_out * original)"),),
    "shifts what did not fail": (("p.selection.status[z].info != 0;\n    return", "true;\n    return"),),
    "ratio without the norms of columns": (("root / sqrtf(original)", "root"),),
    "solves where the factor failed": (
        ("|| p.status[z].info != 0) return;\n    const int tiles", ") return;\n    const int tiles"),
    ),
    "forgets the outcome of panels it leaves alone": (
        ("if (threadIdx.x == 0) p.status[z] = p.selection.status[z];", ""),
    ),
    "goes on after a column that failed": (("if (j > 0 && p.status[z].info != 0) return;", ""),),
    "forgets the outcome of panels it leaves alone, by columns": (
        ("if (j == 0 && threadIdx.x == 0)", "if (false)"),
    ),
    "multiplies by an inverse that is not whole": (
        ("__syncthreads();  // tile and inverse are there", "//"),
    ),
    "begins on the diagonal instead of below": (
        ("i = j + 1 + blockIdx.x % below", "i = j + blockIdx.x % below"),
    ),
    "counts the columns so far": (("is_last ? ratio_of", "j == 0 ? ratio_of"),),
    "takes the ill-conditioned for the good": (
        ("status.ratio < selection.threshold", "status.ratio > selection.threshold"),
    ),
    "takes the failed for ill-conditioned": (("return selection.which & FAILED;", "return true;"),),
}
