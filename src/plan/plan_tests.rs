//! Properties of every plan, over random sets of parameters.
#![allow(clippy::cast_possible_truncation, clippy::needless_range_loop)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use crate::layout::{Axis, Collective, Layout, Placement, Reduction, lower};
use crate::plan::{BlockShard, GroupSpec, Instr, ParamInput, Place, Plan, Transfer};
use crate::spec::{OptionValue, Options, ParamSpec};
use crate::tensor::{DType, Device};

const ALGORITHMS: [&str; 12] = [
    "adafactor",
    "adamw",
    "apollo_adamw",
    "came",
    "dion",
    "dion2",
    "galore_adamw",
    "lamb",
    "lion",
    "muon",
    "nordion2",
    "normuon",
];

/// First retries the failures that were found before, from the file next to this one.
fn saved_with_source() -> ProptestConfig {
    let kept = FileFailurePersistence::WithSource("proptest-regressions");
    ProptestConfig { failure_persistence: Some(Box::new(kept)), ..ProptestConfig::default() }
}

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        prop::collection::vec(0_usize..9, 2..=2),
        prop::collection::vec(1_usize..40, 2..=2),
        prop::collection::vec(1_usize..6, 3..=4),
    ]
}

fn group(algorithm: &str, limit: Option<i64>) -> GroupSpec {
    let mut options = Options::of_tests();
    options.insert("rank_fraction", OptionValue::Float(0.5));
    options.insert("rank", OptionValue::Int(2));
    options.insert("interleaved", OptionValue::Int(1)); // four dimensions are a stack
    options.insert("max_batch_bytes", limit.map_or(OptionValue::None, OptionValue::Int));
    GroupSpec { algorithm: algorithm.into(), options }
}

fn inputs(shapes: &[(Vec<usize>, usize, bool)]) -> Vec<ParamInput> {
    shapes
        .iter()
        .enumerate()
        .map(|(index, (shape, group, half))| ParamInput {
            spec: ParamSpec {
                index,
                stream: index as u64,
                name: format!("p{index}"),
                shape: shape.clone(),
                dtype: if *half { DType::BF16 } else { DType::F32 },
                transposed: None,
            },
            layout: Layout::default(),
            named: Vec::new(),
            group: *group,
            place: Place::HOST,
            frozen: false,
            states: BTreeMap::new(),
        })
        .collect()
}

fn plan(shapes: &[(Vec<usize>, usize, bool)], limit: Option<i64>) -> Plan {
    let groups: Vec<GroupSpec> = ALGORITHMS.iter().map(|name| group(name, limit)).collect();
    Plan::build(inputs(shapes), &groups).unwrap()
}

prop_compose! {
    fn params()(list in prop::collection::vec((shape(), 0..ALGORITHMS.len(), any::<bool>()), 0..24)) -> Vec<(Vec<usize>, usize, bool)> {
        list
    }
}

proptest! {
    #![proptest_config(saved_with_source())]
    #[test]
    fn plan_any_parameters_covers_every_element_once(list in params(), limit in prop::option::of(1_i64..100_000)) {
        let plan = plan(&list, limit);
        let mut seen = BTreeSet::new();
        for bucket in &plan.buckets {
            for unit in &bucket.units {
                let all = 0..plan.params[unit.param].spec.numel();
                let all = if bucket.whole_parameter { all.collect() } else { unit.shard.block.elements().collect::<Vec<_>>() };
                for element in all {
                    prop_assert!(seen.insert((unit.param, element)), "element {element} of p{} twice", unit.param);
                }
            }
        }
        let elements: usize = list.iter().map(|(shape, ..)| shape.iter().product::<usize>()).sum();
        prop_assert_eq!(seen.len(), elements);
    }

    #[test]
    fn plan_any_parameters_keeps_buffers_of_a_bucket_disjoint(list in params(), limit in prop::option::of(1_i64..100_000)) {
        let plan = plan(&list, limit);
        prop_assert_eq!(plan.arena.places.len(), plan.buckets.len());
        for (bucket, places) in plan.buckets.iter().zip(&plan.arena.places) {
            for (i, a) in places.iter().enumerate() {
                if let Some(buffer) = bucket.program.buffers.get(i).filter(|_| !bucket.whole_parameter) {
                    let count = if buffer.shared { 1 } else { bucket.units.len() };
                    prop_assert_eq!(a.bytes, buffer.rows * buffer.cols * buffer.dtype.bytes() * count);
                }
                prop_assert!(a.offset + a.bytes <= plan.arena.bytes);
                prop_assert!(places[i + 1..].iter().all(|b| !a.overlaps(b)));
            }
        }
    }

    #[test]
    fn plan_any_parameters_schedules_computes_in_bucket_order(list in params()) {
        let plan = plan(&list, None);
        let order: Vec<Instr> = (0..plan.buckets.len()).map(Instr::Compute).collect();
        prop_assert_eq!(&plan.schedule, &order);
        let flat: Vec<bool> = plan.buckets.iter().map(|b| plan.algorithms[b.algorithm].flat()).collect();
        prop_assert!(flat.is_sorted(), "elementwise buckets come last");
    }

    #[test]
    fn plan_same_parameters_has_the_same_fingerprint(list in params()) {
        prop_assert_eq!(plan(&list, None).fingerprint(), plan(&list, None).fingerprint());
    }

    #[test]
    fn plan_any_parameters_slices_states_within_bounds(list in params()) {
        let plan = plan(&list, None);
        for planned in &plan.params {
            for state in &planned.states {
                let elements: usize = state.shape().iter().product();
                let inside = |shard: &BlockShard| {
                    let at = state.part(shard);
                    at.numel() == 0 || at.offset + (at.rows - 1) * at.stride + at.cols <= elements
                };
                prop_assert!(planned.shards.iter().all(inside));
            }
        }
    }
}

/// A mesh of three axes with placements for matrices; the first axis holds copies.
#[derive(Clone, Debug)]
struct Grid {
    sizes: [usize; 3],
    pending: bool,
    placements: [Placement; 2],
}

impl Grid {
    fn layout(&self, shape: &[usize], rank: usize) -> Layout {
        let [_, b, c] = self.sizes;
        let at = [rank / (b * c), rank / c % b, rank % c];
        let strides = [b * c, c, 1];
        let mut layout = Layout::default();
        for d in 0..3 {
            let first = rank - at[d] * strides[d];
            let ranks = (0..self.sizes[d]).map(|i| (first + i * strides[d]) as u64).collect();
            layout.mesh.axes.push(Axis { name: format!("a{d}"), ranks, coordinate: at[d] });
            layout.placements.push(match d {
                0 if self.pending => Placement::Partial(Reduction::Avg),
                0 => Placement::Replicate,
                _ if shape.len() < 2 => Placement::Replicate,
                _ => self.placements[d - 1],
            });
        }
        layout
    }

    fn plans(&self, shapes: &[(Vec<usize>, usize, bool)]) -> Vec<Plan> {
        let groups: Vec<GroupSpec> = ALGORITHMS.iter().map(|name| group(name, None)).collect();
        let count: usize = self.sizes.iter().product();
        (0..count)
            .map(|rank| {
                let mut params = inputs(shapes);
                for param in &mut params {
                    param.layout = self.layout(&param.spec.shape, rank);
                }
                Plan::build(params, &groups).unwrap()
            })
            .collect()
    }
}

prop_compose! {
    fn grid()(a in 1_usize..4, b in 1_usize..5, c in 1_usize..4, pending in any::<bool>(), kind in 0_usize..5) -> Grid {
        let placements = [
            [Placement::Shard(0), Placement::Shard(1)],
            [Placement::Shard(1), Placement::Shard(0)],
            [Placement::Shard(0), Placement::Shard(0)],
            [Placement::Strided(0), Placement::Shard(0)],
            [Placement::Replicate, Placement::Shard(1)],
        ][kind];
        Grid { sizes: [a, b, c], pending, placements }
    }
}

proptest! {
    #![proptest_config(saved_with_source())]
    #[test]
    fn plan_any_mesh_sends_to_each_rank_what_that_rank_expects(list in params(), grid in grid()) {
        let plans = grid.plans(&list);
        // The n-th transfer along a line of ranks is the same collective on all of them.
        let mut lines: BTreeMap<Vec<u64>, BTreeMap<u64, Vec<&Transfer>>> = BTreeMap::new();
        for (rank, plan) in plans.iter().enumerate() {
            for instr in &plan.schedule {
                if let Instr::Issue(k) = instr {
                    let transfer = &plan.transfers[*k];
                    let line = lines.entry(transfer.axis.ranks.clone()).or_default();
                    line.entry(rank as u64).or_default().push(transfer);
                }
            }
        }
        for (ranks, issued) in &lines {
            let length = issued.values().next().unwrap().len();
            prop_assert!(ranks.iter().all(|r| issued.get(r).is_some_and(|list| list.len() == length)));
            for n in 0..length {
                for (i, a) in ranks.iter().enumerate() {
                    for (j, b) in ranks.iter().enumerate() {
                        let (one, other) = (issued[a][n], issued[b][n]);
                        prop_assert_eq!(one.collective, other.collective);
                        match one.collective {
                            Collective::AllToAll | Collective::ReduceScatter(_) => {
                                prop_assert_eq!(one.send_bytes[j], other.recv_bytes[i]);
                            }
                            Collective::AllGather => prop_assert_eq!(one.send.bytes, other.recv_bytes[i]),
                            _ => prop_assert_eq!(one.send.bytes, other.send.bytes),
                        }
                        prop_assert!(one.send.offset + one.send.bytes <= plans[*a as usize].arena.bytes);
                        prop_assert!(one.recv.offset + one.recv.bytes <= plans[*a as usize].arena.bytes);
                    }
                }
            }
        }
    }

    #[test]
    fn plan_any_mesh_stores_every_element_once_in_each_copy(list in params(), grid in grid()) {
        let plans = grid.plans(&list);
        let copies: usize = grid.sizes[0] * if grid.placements[0] == Placement::Replicate { grid.sizes[1] } else { 1 };
        for (index, (shape, ..)) in list.iter().enumerate() {
            let stored: usize = plans.iter().map(|p| p.params[index].local.iter().product::<usize>()).sum();
            let copies = if shape.len() < 2 { plans.len() } else { copies };
            prop_assert_eq!(stored, copies * shape.iter().product::<usize>());
        }
    }

    #[test]
    fn plan_any_mesh_gives_no_element_of_a_state_to_two_blocks(list in params(), grid in grid()) {
        for planned in grid.plans(&list).iter().flat_map(|plan| &plan.params) {
            for state in planned.states.iter().filter(|state| state.scales_of.is_none()) {
                let mut owned = BTreeSet::new();
                let parts = planned.shards.iter().map(|shard| state.part(shard));
                for at in parts.flat_map(|part| (0..part.rows).flat_map(move |row| {
                    (0..part.cols).map(move |col| part.offset + row * part.stride + col)
                })) {
                    prop_assert!(owned.insert(at), "{} of {}: element {at}", state.name(), planned.spec.name);
                }
            }
        }
    }

    #[test]
    fn plan_any_mesh_gives_processes_equal_shares_of_a_bucket(list in params(), grid in grid()) {
        for bucket in grid.plans(&list).iter().flat_map(|p| &p.buckets).filter(|b| !b.owner_axes.is_empty()) {
            let mut counts: BTreeMap<&[usize], usize> = BTreeMap::new();
            bucket.units.iter().for_each(|u| *counts.entry(&u.owner).or_insert(0) += 1);
            let takers: usize = bucket.owner_axes.iter().map(|&a| bucket.axes[a].axis.ranks.len()).product();
            prop_assert_eq!(counts.values().copied().max().unwrap_or(0), bucket.units.len().div_ceil(takers));
            prop_assert!(bucket.units.is_sorted_by_key(|u| &u.owner));
        }
    }

    #[test]
    fn plan_any_mesh_has_one_fingerprint(list in params(), grid in grid()) {
        let prints: BTreeSet<String> = grid.plans(&list).iter().map(Plan::fingerprint).collect();
        prop_assert_eq!(prints.len(), 1);
    }
}

/// Elements of a matrix that a rank holds under a placement along one axis; those of a partial value are contributions.
fn held(
    placement: Placement,
    [rows, cols]: [usize; 2],
    ranks: usize,
    rank: usize,
) -> BTreeSet<(usize, usize)> {
    let chunk = |size: usize| {
        let each = size.div_ceil(ranks);
        (each * rank).min(size)..(each * (rank + 1)).min(size)
    };
    let (rows, cols) = match placement {
        Placement::Shard(0) | Placement::Strided(0) => (chunk(rows), 0..cols),
        Placement::Shard(_) | Placement::Strided(_) => (0..rows, chunk(cols)),
        Placement::OwnerSharded if rank > 0 => (0..0, 0..0), // a matrix has one owner
        _ => (0..rows, 0..cols),
    };
    rows.flat_map(|row| cols.clone().map(move |col| (row, col))).collect()
}

fn placement() -> impl Strategy<Value = Placement> {
    prop_oneof![
        Just(Placement::Replicate),
        (0_usize..2).prop_map(Placement::Shard),
        (0_usize..2).prop_map(Placement::Strided),
        Just(Placement::OwnerSharded),
        prop_oneof![Just(Reduction::Sum), Just(Reduction::Avg)].prop_map(Placement::Partial),
    ]
}

proptest! {
    #![proptest_config(saved_with_source())]
    #[test]
    fn lower_any_placements_moves_missing_and_adds_partial_data(
        from in placement(), to in placement(), ranks in 1_usize..6, shape in [1_usize..7, 1_usize..7]
    ) {
        let (before, after): (Vec<_>, Vec<_>) =
            (0..ranks).map(|rank| (held(from, shape, ranks, rank), held(to, shape, ranks, rank))).unzip();
        let stays = before.iter().zip(&after).all(|(has, needs)| needs.is_subset(has));
        let partial = matches!(from, Placement::Partial(_));
        match lower(from, to, ranks) {
            // No redistribution leads to a partial placement.
            None => prop_assert!(matches!(to, Placement::Partial(_)) && from != to && ranks > 1),
            Some(Collective::Nothing) => prop_assert!(ranks == 1 || from == to),
            Some(Collective::Slice) => prop_assert!(stays && !partial),
            Some(Collective::AllReduce(how)) => {
                prop_assert!(from == Placement::Partial(how) && to == Placement::Replicate);
            }
            Some(Collective::ReduceScatter(how)) => {
                prop_assert!(from == Placement::Partial(how) && to != Placement::Replicate);
            }
            Some(Collective::AllGather) => {
                prop_assert!(!partial && after.iter().all(|needs| needs.len() == shape[0] * shape[1]));
                let all: BTreeSet<_> = before.iter().flatten().copied().collect();
                prop_assert_eq!(&all, &after[0]);
            }
            Some(Collective::AllToAll) => {
                prop_assert!(!partial && to != Placement::Replicate && from != Placement::Replicate);
                let all: BTreeSet<_> = before.iter().flatten().copied().collect();
                prop_assert!(after.iter().all(|needs| needs.is_subset(&all)));
            }
        }
        // No data moves only where none is missing.
        if ranks > 1 && matches!(lower(from, to, ranks), Some(Collective::Nothing | Collective::Slice)) {
            prop_assert!(stays);
        }
    }

    #[test]
    fn plan_any_sizes_is_built_or_refused_in_words(
        sizes in prop::collection::vec(prop_oneof![0_usize..40, any::<u32>().prop_map(|n| n as usize), any::<usize>()], 2..=4),
        algorithm in 0..ALGORITHMS.len()
    ) {
        let groups: Vec<GroupSpec> = ALGORITHMS.iter().map(|name| group(name, None)).collect();
        let extent = sizes.iter().try_fold(1_usize, |all, &size| all.checked_mul(size.max(1)));
        match Plan::build(inputs(&[(sizes.clone(), algorithm, false)]), &groups) {
            Ok(plan) => prop_assert!(extent.is_some() && plan.arena.bytes < 1 << 62),
            Err(error) => {
                let said = error.to_string();
                prop_assert!(said.contains("p0") && said.contains(&format!("{sizes:?}")), "{said}");
                prop_assert!(extent.is_none_or(|extent| extent > 1 << 20), "{said}");
            }
        }
    }
}

#[test]
fn plan_unknown_algorithm_names_the_known_ones() {
    let error =
        Plan::build(inputs(&[(vec![2, 2], 0, false)]), &[group("adam", None)]).unwrap_err().to_string();
    assert!(ALGORITHMS.iter().all(|name| error.contains(name)) && error.contains("'adam'"), "{error}");
}

#[test]
fn plan_vector_in_a_matrix_group_names_the_parameter() {
    for name in ["dion", "muon"] {
        let error =
            Plan::build(inputs(&[(vec![5], 0, false)]), &[group(name, None)]).unwrap_err().to_string();
        assert!(error.contains("p0") && error.contains("[5]") && error.contains("strict=False"), "{error}");
    }
}

#[test]
fn plan_small_bound_splits_the_bucket() {
    let dion = ALGORITHMS.iter().position(|name| *name == "dion").unwrap();
    let list: Vec<_> = (0..10).map(|_| (vec![16, 8], dion, false)).collect();
    assert_eq!(plan(&list, None).buckets.len(), 1);
    assert_eq!(plan(&list, Some(1)).buckets.len(), 10);
}

#[test]
fn plan_for_a_device_orthonormalizes_in_bfloat16_by_default() {
    let product = |dtype: DType, orth_dtype: Option<&str>| {
        let mut group = group("muon", None);
        if let Some(name) = orth_dtype {
            group.options.insert("orth_dtype", OptionValue::Str(name.into()));
        }
        let mut params = inputs(&[(vec![8, 6], 0, false)]);
        params[0].spec.dtype = dtype;
        params[0].place = Place { device: Device::Cuda(0), matrix_units: true, multiprocessors: 0 };
        Plan::build(params, &[group]).unwrap().buckets[0].program.buffers[0].dtype
    };
    assert_eq!(product(DType::F32, None), DType::BF16);
    assert_eq!(product(DType::F32, Some("auto")), DType::BF16);
    assert_eq!(product(DType::F32, Some("float32")), DType::F32);
    assert_eq!(product(DType::F16, None), DType::BF16);
    assert_eq!(product(DType::F64, None), DType::F64);
}
