//! 8-bit states and parameters with stochastic rounding: what they need in addition to what an algorithm asks for.

use std::collections::BTreeMap;

use super::average::AVERAGE;
use super::local::{LocalState, SCALES};
use crate::error::{Error, Result};
use crate::layout::{Layout, ShardingAxes};
use crate::spec::{Block, DimSharding, Init, Options, ParamSpec, Quantization, Share, StateSpec};
use crate::tensor::DType;

/// The smallest block that is worth its scale.
const LEAST_BLOCK: usize = 8;

/// Returns the states with the dtypes of those that exist.
///
/// # Errors
/// `Error::Value` for bytes where an 8-bit state is not possible, and for 8-bit values without scales or the reverse.
pub(super) fn taken(
    p: &ParamSpec,
    states: Vec<StateSpec>,
    existing: &BTreeMap<String, (DType, Vec<usize>)>,
) -> Result<Vec<StateSpec>> {
    let one = |mut state: StateSpec| {
        let scales = existing.contains_key(&format!("{}{SCALES}", state.role));
        let wrong = |what: &str, help: &str| {
            Err(Error::Value(format!("{}: state '{}' {what}. {help}", p.name, state.role)))
        };
        match (existing.get(state.role).map(|(dtype, _)| *dtype), state.quantized) {
            (Some(dtype), None) if dtype.is_quantized() => {
                return wrong("is uint8, which it never is here", "Load a checkpoint of the same optimizer");
            }
            (Some(dtype), Some(_)) if dtype.is_quantized() && !scales => {
                return wrong(
                    "is uint8 without its absmax",
                    "Load both: without it the values have no scale",
                );
            }
            (None, Some(_)) if scales => {
                return wrong("has an absmax without quantized values", "Load both, or neither");
            }
            (Some(dtype), Some(quantized)) if dtype.is_quantized() => state.dtype = quantized.dtype,
            (Some(dtype), _) if !state.on_host => state.dtype = dtype,
            _ => {}
        }
        Ok(state)
    };
    states.into_iter().map(one).collect()
}

/// The states as they are stored here, those of 8 bits with their scales behind all others.
///
/// # Errors
/// `Error::Layout` and `Error::Value` where a block would be in two parts of the state.
pub(super) fn local(
    p: &ParamSpec,
    blocks: &[Block],
    states: Vec<StateSpec>,
    layout: &Layout,
) -> Result<Vec<LocalState>> {
    let mut scales = Vec::new();
    for (number, state) in states.iter().enumerate() {
        let (true, Some(quantized), Some(&width)) =
            (state.dtype.is_quantized(), state.quantized, state.shape.last())
        else {
            continue;
        };
        check_cuts(p, state, quantized, layout)?;
        if state.share == Share::Like {
            check_blocks(p, quantized.block, width, blocks)?;
        }
        let spec = StateSpec {
            role: state.role,
            shape: quantized.scales(&state.shape),
            dtype: DType::F32,
            init: Init::Zeros,
            sharding: state.sharding.clone(),
            share: Share::All,
            moment: None,
            quantized: None,
            on_host: false,
        };
        scales.push(LocalState { scales_of: Some(number), ..LocalState::of(spec, layout) });
    }
    Ok(states.into_iter().map(|state| LocalState::of(state, layout)).chain(scales).collect())
}

/// Refuses a last dimension that is sharded inside of blocks, for whichever process.
fn check_cuts(p: &ParamSpec, state: &StateSpec, quantized: Quantization, layout: &Layout) -> Result<()> {
    let dim = state.shape.len() - 1;
    let (Some(&width), Some(DimSharding::LikeParam(source) | DimSharding::Even(source))) =
        (state.shape.last(), state.sharding.last())
    else {
        return Ok(());
    };
    let (sharding, _) = ShardingAxes::of(layout, *source);
    let parts = sharding.all(width);
    let fits = |block: usize| {
        let wanted: Vec<_> = parts.iter().map(|(start, len)| (start / block, len.div_ceil(block))).collect();
        let whole = |(start, len): &(usize, usize)| {
            start.is_multiple_of(block) && ((start + len).is_multiple_of(block) || start + len == width)
        };
        let mut scales = sharding.all(width.div_ceil(block));
        let (mut wanted, filled) =
            (wanted, |parts: &mut Vec<(usize, usize)>| parts.retain(|(_, len)| *len > 0));
        filled(&mut wanted);
        filled(&mut scales);
        parts.iter().filter(|(_, len)| *len > 0).all(whole) && wanted == scales
    };
    if sharding.depth() == 0 || fits(quantized.block) {
        return Ok(());
    }
    let best =
        (0..usize::BITS).map(|n| 1 << n).take_while(|n| *n < quantized.block).filter(|n| fits(*n)).last();
    Err(Error::Layout {
        param: p.name.clone(),
        what: format!(
            "dimension {dim} of {width} is sharded among {} processes inside of blocks of {} elements, and its \
             8-bit states have one scale for each block",
            sharding.num_shards(),
            quantized.block,
        ),
        help: match best {
            Some(best) if best >= LEAST_BLOCK => {
                format!("Set block_size={best} in its group, shard another dimension, or set state_bits=32")
            }
            _ => "Shard another dimension, or set state_bits=32 in its group".into(),
        },
    })
}

/// Refuses matrices of a parameter whose columns begin or end inside of blocks: two would share a scale.
fn check_blocks(p: &ParamSpec, block: usize, width: usize, blocks: &[Block]) -> Result<()> {
    let ends: Vec<usize> = blocks
        .iter()
        .filter(|b| p.shape.len() > 1 && (b.rows > 1 || b.cols < width)) // vectors are taken whole
        .flat_map(|b| [b.offset % width.max(1), (b.offset + b.cols) % width.max(1)])
        .collect();
    if ends.iter().all(|end| end.is_multiple_of(block)) {
        return Ok(());
    }
    let best = 1_usize << ends.iter().map(|end| end.trailing_zeros()).min().unwrap_or(0).min(usize::BITS - 1);
    let help = if best >= LEAST_BLOCK {
        format!("Set block_size={best} in its group, or state_bits=32")
    } else {
        "Set state_bits=32 in its group".into()
    };
    Err(Error::Value(format!(
        "{}: its blocks of columns begin inside of the blocks of {block} elements, and its 8-bit states have \
         one scale for each block. {help}",
        p.name
    )))
}

/// The seed by which a parameter is rounded at random, if it is.
///
/// # Errors
/// `Error::Value` for settings of the wrong kind.
pub(super) fn rounding(p: &ParamSpec, options: &Options) -> Result<Option<u64>> {
    let seed = options.count("seed")? as u64;
    Ok((p.dtype == DType::BF16 && options.flag("stochastic_rounding")?).then_some(seed))
}

/// Has moments of 8 and 16 bits and averages of 16 rounded at random: rounded to the nearest they would stand still where a
/// step changes them by less than half of the distance of two numbers.
///
/// # Errors
/// `Error::Value` for settings of the wrong kind.
pub(super) fn round_states(states: &mut [LocalState], options: &Options) -> Result<()> {
    let seed = options.count("seed")? as u64;
    let is_rounded = |state: &&mut LocalState| match state.spec.dtype {
        DType::BF16 | DType::F16 => state.spec.moment.is_some() || state.spec.role == AVERAGE,
        dtype => dtype.is_quantized(),
    };
    for state in states.iter_mut().filter(is_rounded) {
        state.rounding = Some(seed);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::layout::{Axis, Mesh, Placement};
    use crate::spec::StateStorage;

    fn layout(sharding: &[(usize, usize, Placement)]) -> Layout {
        let axis = |&(n, at, _): &(usize, usize, Placement)| Axis {
            name: "x".into(),
            ranks: (0..n as u64).collect(),
            coordinate: at,
        };
        Layout {
            mesh: Mesh { axes: sharding.iter().map(axis).collect(), ..Mesh::default() },
            placements: sharding.iter().map(|&(_, _, placement)| placement).collect(),
        }
    }

    /// The 8-bit state of a parameter and its scales, as they lie on a layout.
    fn laid_out(shape: &[usize], block: i64, layout: &Layout) -> Result<Vec<LocalState>> {
        let mut options = Options::of_tests();
        for (key, value) in [("state_bits", 8), ("block_size", block), ("min_quant_numel", 0)] {
            options.insert(key, crate::spec::OptionValue::Int(value));
        }
        let storage = StateStorage::from_options(&options)?;
        let (shape, name) = (shape.to_vec(), String::from("weight"));
        let p = ParamSpec { index: 0, stream: 0, name, shape, dtype: DType::F64, transposed: None };
        let momentum = storage.momentum(&p, None);
        let whole = [Block { rows: 1, cols: p.numel(), ..Block::default() }];
        local(&p, &whole, vec![momentum], layout)
    }

    proptest! {
        #[test]
        fn scales_of_any_cut_are_near_their_blocks(
            rows in 1_usize..9, blocks in 1_usize..40, rest in 0_usize..16, n in 1_usize..6, m in 1_usize..4, strided: bool
        ) {
            let width = 16 * blocks + rest;
            let second = if strided { Placement::Strided(1) } else { Placement::Shard(1) };
            let at = |i, j| layout(&[(n, i, second), (m, j, Placement::Shard(1))]);
            let all: Vec<_> = (0..n).flat_map(|i| (0..m).map(move |j| (i, j))).collect();
            let found: Vec<_> = all.iter().map(|&(i, j)| laid_out(&[rows, width], 16, &at(i, j))).collect();
            // All processes agree whether it can be done.
            prop_assert!(found.iter().all(|f| f.is_ok() == found[0].is_ok()));
            let whole = all.iter().all(|&(i, j)| {
                let (start, len) = crate::layout::spans(&[width], &at(i, j).on_columns())[0];
                len == 0 || (start % 16 == 0 && ((start + len) % 16 == 0 || start + len == width))
            });
            prop_assert_eq!(found[0].is_ok(), whole);
            for states in found.into_iter().flatten() {
                let ((start, len), (first, count)) = (states[0].spans[1], states[1].spans[1]);
                prop_assert_eq!(count, len.div_ceil(16));
                prop_assert!(len == 0 || first == start / 16);
                prop_assert_eq!(&states[0].shards, &states[1].shards);
            }
        }
    }

    impl Layout {
        /// Layout of a tensor that has only the second dimension.
        fn on_columns(mut self) -> Self {
            for placement in &mut self.placements {
                *placement = match placement {
                    Placement::Strided(_) => Placement::Strided(0),
                    _ => Placement::Shard(0),
                };
            }
            self
        }
    }

    #[test]
    fn local_cut_inside_of_blocks_names_the_largest_block_that_fits() {
        let error =
            laid_out(&[64, 640], 256, &layout(&[(2, 0, Placement::Shard(1))])).unwrap_err().to_string();
        assert!(error.contains("weight") && error.contains("block_size=64"), "{error}");
        let error =
            laid_out(&[64, 646], 256, &layout(&[(2, 1, Placement::Shard(1))])).unwrap_err().to_string();
        assert!(!error.contains("block_size=") && error.contains("state_bits=32"), "{error}");
        assert!(laid_out(&[63, 646], 256, &layout(&[(2, 1, Placement::Shard(0))])).is_ok());
    }
}
