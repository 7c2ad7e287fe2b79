//! The program of `GaLore`.

use super::super::low_rank::OWNED;
use super::layout::{ADAM, APPLY, LOW, LOW_ALL, OVERLAPS, PROJECT, SUM, TURN};
use super::{GaLore, Origin};
use crate::program::{BufferSpec, Program, Target};
use crate::spec::{DimSharding, Side, UnitShape};
use crate::tensor::DType;

impl GaLore {
    /// Buffers and stages for matrices of a class.
    pub(super) fn compose(&self, shape: &UnitShape) -> Program {
        let (sides, rank, product) = (self.sides(shape), self.common.rank(), shape.param.arithmetic());
        let size = [shape.rows, shape.cols];
        let with = [DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols)];
        let (both, from) = (sides.len() == 2, self.from(shape));
        let none = |name| BufferSpec::new(name, 1, 0, product);
        let square = |name, over| BufferSpec::new(name, rank, rank, product).summed(over);
        let low = match *sides {
            [Side::Cols] => {
                BufferSpec::new("r", size[0], rank, product).sharded(with[0], DimSharding::Replicated)
            }
            [Side::Rows] => {
                BufferSpec::new("r", rank, size[1], product).sharded(DimSharding::Replicated, with[1])
            }
            _ => BufferSpec::new("r", rank, rank, product),
        };
        let source = match from {
            Origin::Here => none("source"),
            Origin::Sums(over) => {
                let d = size[sides[0].index()];
                let cols = self.sketch_columns(d).unwrap_or(d);
                BufferSpec::new("source", d, cols, DType::F64).summed(over)
            }
            Origin::Sent => BufferSpec::new("source", size[0], size[1], product).sharded(with[0], with[1]),
        };
        let is_owned = self.common.is_owned(shape, sides);
        // Owners add over both sides at once.
        let (summed, is_in_two) = (if is_owned { sides } else { &sides[..1] }, both && !is_owned);
        let owned = if is_owned { OWNED.to_vec() } else { Vec::new() };
        let mut program = Program { exclusive: true, owned, ..Program::new() }
            .buffer(summed.iter().fold(low, |low, &side| low.summed(side)))
            .buffer(if is_in_two { square("r_all", Side::Cols) } else { none("r_all") })
            .buffer(source);
        for i in 0..2 {
            program = program.buffer(sides.get(i).map_or(none("basis"), |&side| {
                BufferSpec::new("basis", size[side.index()], rank, product)
                    .sharded(with[side.index()], DimSharding::Replicated)
            }));
        }
        for i in 0..2 {
            let turned = sides.get(i).filter(|_| self.rotate);
            program = program.buffer(turned.map_or(none("overlap"), |&side| square("overlap", side)));
        }
        let wide = if shape.param != product || self.common.cautious {
            size[0].div_ceil(shape.num_shards[0]) * size[1].div_ceil(shape.num_shards[1])
        } else {
            0
        };
        let found = usize::from(Self::is_basis_sharded(sides, shape.num_shards));
        program = program.scratch("wide", wide, product).buffer(BufferSpec::new("found", 1, found, product));
        program = program.when_due(|part| self.refresh(part, sides, from, [found > 0, is_owned]));
        program = program.local(PROJECT, "project");
        if is_owned {
            program = self.at_owners(program.redistribute(LOW, Target::Whole), sides);
            return program.redistribute(LOW, Target::Storage).local(APPLY, "apply");
        }
        program = program.redistribute(LOW, Target::Replicate);
        if both {
            program = program.local(SUM, "sum").redistribute(LOW_ALL, Target::Replicate);
        }
        program.local(APPLY, "apply")
    }

    /// Appends Adam's step on whole projected gradients.
    fn at_owners(&self, mut program: Program, sides: &[Side]) -> Program {
        if self.rotate {
            let overlaps = &OVERLAPS[..sides.len()];
            program = program.when_due(|part| {
                let part =
                    overlaps.iter().fold(part, |part, &overlap| part.redistribute(overlap, Target::Whole));
                overlaps.iter().fold(part.local(TURN, "turn"), |part, &overlap| part.release(overlap))
            });
        }
        program.local(ADAM, "adam")
    }
}
