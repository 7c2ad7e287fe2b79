//! Properties of every plan, over random sets of parameters.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use _oxidion::dtype::DType;
use _oxidion::layout::Layout;
use _oxidion::options::{OptionValue, Options};
use _oxidion::plan::{GroupSpec, Instr, ParamInput, Plan};
use _oxidion::spec::ParamSpec;
use proptest::prelude::*;

const ALGORITHMS: [&str; 4] = ["adamw", "dion", "lion", "muon"];

fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop_oneof![
        prop::collection::vec(0_usize..9, 2..=2),
        prop::collection::vec(1_usize..40, 2..=2),
        prop::collection::vec(1_usize..6, 3..=4),
    ]
}

fn group(algorithm: &str, limit: Option<i64>) -> GroupSpec {
    let mut options = Options::default();
    options.insert("rank_fraction", OptionValue::Float(0.5));
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
                name: format!("p{index}"),
                shape: shape.clone(),
                dtype: if *half { DType::BF16 } else { DType::F32 },
            },
            layout: Layout::default(),
            group: *group,
            frozen: false,
            state_dtypes: BTreeMap::new(),
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
    #[test]
    fn plan_any_parameters_covers_every_element_once(list in params(), limit in prop::option::of(1_i64..100_000)) {
        let plan = plan(&list, limit);
        let mut seen = BTreeSet::new();
        for bucket in &plan.buckets {
            for unit in &bucket.units {
                for element in unit.block.range() {
                    prop_assert!(seen.insert((unit.param, element)), "element {element} of p{} twice", unit.param);
                }
            }
        }
        let elements: usize = list.iter().map(|(shape, ..)| shape.iter().product::<usize>()).sum();
        prop_assert_eq!(seen.len(), elements);
    }

    #[test]
    fn plan_any_parameters_keeps_the_buffers_of_a_bucket_apart(list in params(), limit in prop::option::of(1_i64..100_000)) {
        let plan = plan(&list, limit);
        prop_assert_eq!(plan.arena.places.len(), plan.buckets.len());
        for (bucket, places) in plan.buckets.iter().zip(&plan.arena.places) {
            for (i, a) in places.iter().enumerate() {
                prop_assert_eq!(a.bytes, bucket.program.buffers[i].bytes(bucket.units.len()));
                prop_assert!(a.offset + a.bytes <= plan.arena.bytes);
                prop_assert!(places[i + 1..].iter().all(|b| !a.overlaps(b)));
            }
        }
    }

    #[test]
    fn plan_any_parameters_schedules_every_compute_once_and_in_bucket_order(list in params()) {
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
        for member in &plan.members {
            for state in &member.states {
                let elements: usize = state.shape.iter().product();
                prop_assert_eq!(state.slices.len(), member.blocks.len());
                prop_assert!(state.slices.iter().all(|s| s.end <= elements));
            }
        }
    }
}

#[test]
fn plan_unknown_algorithm_names_the_known_ones() {
    let error =
        Plan::build(inputs(&[(vec![2, 2], 0, false)]), &[group("adam", None)]).unwrap_err().to_string();
    assert!(error.contains("adamw, dion, lion, muon") && error.contains("'adam'"), "{error}");
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
    let list: Vec<_> = (0..10).map(|_| (vec![16, 8], 1, false)).collect();
    assert_eq!(plan(&list, None).buckets.len(), 1);
    assert_eq!(plan(&list, Some(1)).buckets.len(), 10);
}
