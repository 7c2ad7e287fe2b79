//! The CUDA sources, as they are compiled into this crate.

/// One source: its kernels become one module.
#[derive(Debug)]
pub(super) struct Source {
    /// File name.
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    /// Its kernels: each of these, with each of `forms` behind it where they have a name.
    pub(super) stems: &'static [&'static str],
    pub(super) forms: &'static [&'static str],
    /// Bytes of shared memory that a block may ask for when it is launched.
    pub(super) shared: u32,
    pub(super) when: When,
}

/// When a source is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// With the first step.
    Always,
    /// With the first step of parameters or states that are more than numbers of their type.
    Encoded,
    /// With the first step on devices of this architecture; others cannot run it.
    On(&'static str),
}

impl Source {
    /// The names of its kernels.
    pub(super) fn kernels(&self) -> impl Iterator<Item = String> {
        let name = |stem: &str, form: &str| {
            if form.is_empty() { String::from(stem) } else { format!("{stem}_{form}") }
        };
        self.stems.iter().flat_map(move |stem| self.forms.iter().map(move |form| name(stem, form)))
    }
}

/// Headers by the name under which they are included.
pub(super) const HEADERS: [(&str, &str); 21] = [
    ("block_sum.cuh", include_str!("block_sum.cuh")),
    ("blocks.cuh", include_str!("blocks.cuh")),
    ("coded.cuh", include_str!("coded.cuh")),
    ("common.cuh", include_str!("common.cuh")),
    ("factored.cuh", include_str!("factored.cuh")),
    ("hopper.cuh", include_str!("hopper.cuh")),
    ("jobs.cuh", include_str!("jobs.cuh")),
    ("lamb.cuh", include_str!("lamb.cuh")),
    ("lines.cuh", include_str!("lines.cuh")),
    ("normal.cuh", include_str!("normal.cuh")),
    ("panel.cuh", include_str!("panel.cuh")),
    ("philox.cuh", include_str!("philox.cuh")),
    ("ptx.cuh", include_str!("ptx.cuh")),
    ("rounding.cuh", include_str!("rounding.cuh")),
    ("search.cuh", include_str!("search.cuh")),
    ("stacks.cuh", include_str!("stacks.cuh")),
    ("summed.cuh", include_str!("summed.cuh")),
    ("swizzle.cuh", include_str!("swizzle.cuh")),
    ("symmetric.cuh", include_str!("symmetric.cuh")),
    ("unfused.cuh", include_str!("unfused.cuh")),
    ("updates.cuh", include_str!("updates.cuh")),
];

/// Elementwise passes, each for small tables of jobs, for large ones and in float64.
pub(super) static UPDATES: Source = Source {
    name: "updates.cu",
    text: include_str!("updates.cu"),
    stems: &[
        "count",
        "momentum",
        "momentum_alone",
        "accumulate",
        "apply",
        "apply_late",
        "convert",
        "release",
        "decay",
        "adamw",
        "adamw_largest",
        "lion",
        "lamb",
        "lamb_along",
        "direction",
    ],
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
};
/// Symmetric products.
pub(super) static SYMMETRIC_MMA: Source = Source {
    name: "symmetric_mma.cu",
    text: include_str!("symmetric_mma.cu"),
    stems: &["symmetric_mma"],
    forms: &["bfloat16", "float16"],
    shared: 65536,
    when: When::Always,
};
/// The same by the instructions of warpgroups.
pub(super) static SYMMETRIC_WGMMA: Source = Source {
    name: "symmetric_wgmma.cu",
    text: include_str!("symmetric_wgmma.cu"),
    stems: &["symmetric_wgmma"],
    forms: &["bfloat16", "float16"],
    shared: 229_440,
    when: When::On("sm_90a"),
};
/// Elementwise passes over codes of blocks and numbers that are rounded at random.
pub(super) static CODED: Source = Source {
    name: "coded.cu",
    text: include_str!("coded.cu"),
    stems: &[
        "momentum_coded",
        "momentum_alone_coded",
        "accumulate_coded",
        "apply_coded",
        "apply_late_coded",
        "convert_coded",
        "release_coded",
        "decay_coded",
        "adamw_coded",
        "adamw_largest_coded",
        "lion_coded",
        "direction_coded",
        "lamb_coded",
        "lamb_along_coded",
    ],
    forms: &["many", "wide"],
    shared: 0,
    when: When::Encoded,
};
/// The same with sums.
pub(super) static CODED_SUMS: Source = Source {
    name: "coded_sums.cu",
    text: include_str!("coded_sums.cu"),
    stems: &["momentum_squares_coded", "lamb_norms_coded", "lamb_norms_only_coded"],
    forms: &["many", "wide"],
    shared: 0,
    when: When::Encoded,
};
/// Gram matrices of panels.
pub(super) static GRAM: Source = Source {
    name: "gram.cu",
    text: include_str!("gram.cu"),
    stems: &["gram_product"],
    forms: &[""],
    shared: 55296,
    when: When::Always,
};
/// Cholesky factors of Gram matrices, and panels divided by them.
pub(super) static CHOLESKY: Source = Source {
    name: "cholesky.cu",
    text: include_str!("cholesky.cu"),
    stems: &["cholesky_factor", "cholesky_solve"],
    forms: &[""],
    shared: 90624,
    when: When::Always,
};
/// Rows made orthogonal.
pub(super) static JACOBI: Source = Source {
    name: "jacobi.cu",
    text: include_str!("jacobi.cu"),
    stems: &["jacobi"],
    forms: &["angles", "turn", "end"],
    shared: 84488,
    when: When::Always,
};
/// Passes over the columns of thin matrices.
pub(super) static COLUMNS: Source = Source {
    name: "columns.cu",
    text: include_str!("columns.cu"),
    stems: &[
        "column_squares_few",
        "column_squares_wide",
        "column_totals",
        "normalize_columns_few",
        "normalize_columns_wide",
        "unit_columns",
    ],
    forms: &[""],
    shared: 0,
    when: When::Always,
};
/// Copies of many rectangles, for small tables and for large ones.
pub(super) static COPIES: Source = Source {
    name: "copies.cu",
    text: include_str!("copies.cu"),
    stems: &["copy"],
    forms: &["few", "many"],
    shared: 0,
    when: When::Always,
};
/// The sum of what ranks contribute.
pub(super) static MESSAGES: Source = Source {
    name: "messages.cu",
    text: include_str!("messages.cu"),
    stems: &["sum"],
    forms: &["messages"],
    shared: 0,
    when: When::Always,
};
/// Normalization by neuron.
pub(super) static NEURONS: Source = Source {
    name: "neurons.cu",
    text: include_str!("neurons.cu"),
    stems: &["neuron"],
    forms: &["squares", "variance", "scale"],
    shared: 0,
    when: When::Always,
};
/// Slices chosen by their sums.
pub(super) static SELECT: Source = Source {
    name: "select.cu",
    text: include_str!("select.cu"),
    stems: &["slice"],
    forms: &["rows", "columns", "chunks", "choice", "take", "apply"],
    shared: 0,
    when: When::Always,
};
/// Elementwise passes with sums.
pub(super) static SUMS: Source = Source {
    name: "sums.cu",
    text: include_str!("sums.cu"),
    stems: &["sum_of_squares", "momentum_squares", "lamb_norms", "lamb_norms_only"],
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
};
/// Sums of what other kernels left.
pub(super) static TOTALS: Source = Source {
    name: "totals.cu",
    text: include_str!("totals.cu"),
    stems: &[
        "add_pieces",
        "add_numbers",
        "add_strips_few",
        "add_strips_many",
        "add_tiles_few",
        "add_tiles_many",
    ],
    forms: &[""],
    shared: 0,
    when: When::Always,
};
/// Factors of jobs.
pub(super) static FACTORS: Source = Source {
    name: "factors.cu",
    text: include_str!("factors.cu"),
    stems: &["lamb_factors", "update_factors"],
    forms: &[""],
    shared: 0,
    when: When::Always,
};
/// Passes over stacks of matrices.
pub(super) static ROWS: Source = Source {
    name: "rows.cu",
    text: include_str!("rows.cu"),
    stems: &[
        "gradient_squares",
        "gradient_and_parameter_squares",
        "update_squares",
        "residual",
        "scaled_apply",
        "scaled_apply_averaged",
        "confident_apply",
    ],
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
};
/// Running means, in float64.
pub(super) static MEANS: Source = Source {
    name: "means.cu",
    text: include_str!("means.cu"),
    stems: &["means", "squares"],
    forms: &["few", "many"],
    shared: 0,
    when: When::Always,
};
/// Low-rank moments.
pub(super) static LOW_RANK: Source = Source {
    name: "low_rank.cu",
    text: include_str!("low_rank.cu"),
    stems: &["low_rank"],
    forms: &["normals", "signs", "guard", "ratios", "measure", "total", "limit", "step"],
    shared: 0,
    when: When::Always,
};
/// What is launched.
pub(super) static SOURCES: &[&Source] = &[
    &UPDATES,
    &SYMMETRIC_MMA,
    &SYMMETRIC_WGMMA,
    &CODED,
    &CODED_SUMS,
    &GRAM,
    &CHOLESKY,
    &JACOBI,
    &COLUMNS,
    &COPIES,
    &MESSAGES,
    &NEURONS,
    &SELECT,
    &SUMS,
    &TOTALS,
    &FACTORS,
    &ROWS,
    &MEANS,
    &LOW_RANK,
];
