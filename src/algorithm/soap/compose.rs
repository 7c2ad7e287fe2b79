//! The program of SOAP.

use super::basis::Bases;
use super::{APPLY, LOAD, ROTATE, STEP, Soap};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{DimSharding, Side, UnitShape};
use crate::tensor::DType;

/// The gradient in the type of products.
pub(super) const GRADIENT: BufferId = 0;
/// The momentum, which becomes the update.
pub(super) const UPDATE: BufferId = 1;
/// The second moment at its owner.
pub(super) const SECOND: BufferId = 2;
/// The sum of the squares of the update.
pub(super) const NORM: BufferId = 3;

/// The buffers of bases, by the first of them.
pub(super) const BASES: BufferId = 4;
/// Offset of the number of the state `SINCE`.
pub(super) const SINCE: BufferId = 0;
/// Offset of the squares of the gradient, for the first side that has a basis and for the second.
pub(super) const SQUARES: BufferId = 1;
/// Offset of the factors.
pub(super) const FACTORS: BufferId = 3;
/// Offset of the bases.
pub(super) const TURNS: BufferId = 5;
/// Offset of the eigenvalues, where each side is whitened by the other.
pub(super) const VALUES: BufferId = 7;
/// Offset of what these take of a gradient.
pub(super) const MEANS: BufferId = 9;

/// Stages of the bases, behind those that an algorithm numbers from 0 on.
pub(super) const KEEP: Stage = 4;
pub(super) const COPY: Stage = 5;
pub(super) const REFRESH: Stage = 6;
pub(super) const TAKE: Stage = 7;

impl Bases {
    /// The program with the buffers of the bases.
    pub(super) fn buffers(&self, mut program: Program, shape: &UnitShape) -> Program {
        let (sides, product) = (self.sides_in(shape), shape.param.arithmetic());
        let is_local = self.is_local(shape);
        let none = |name| BufferSpec::new(name, 1, 0, product);
        let square = |name, side: Side| {
            let d = [shape.rows, shape.cols][side.index()];
            let columns = self.columns(sides, other(side));
            BufferSpec::new(name, d, d, product).sharded(DimSharding::LikeParam(side), columns)
        };
        let moves = !sides.is_empty() && !self.has_states(shape);
        program = program.buffer(if moves { BufferSpec::new("since", 1, 1, product) } else { none("since") });
        for i in 0..2 {
            program = program.buffer(sides.get(i).map_or(none("squares"), |&side| {
                let spec = square("squares", side);
                let whole = [DimSharding::Replicated; 2];
                if is_local { spec.sharded(whole[0], whole[1]) } else { spec }
            }));
        }
        for (name, needed) in [("factor", moves), ("basis", moves)] {
            for i in 0..2 {
                let side = sides.get(i).filter(|_| needed);
                program = program.buffer(side.map_or(none(name), |&side| {
                    let spec = square(name, side);
                    if is_local && name == "factor" { spec.summed(other(side)) } else { spec }
                }));
            }
        }
        let line = |name, side: Side| {
            BufferSpec::new(name, [shape.rows, shape.cols][side.index()], 1, product)
                .sharded(DimSharding::LikeParam(side), DimSharding::Replicated)
        };
        for (name, needed) in [("values", !is_local && moves), ("means", true)] {
            if self.whitens(sides) {
                program = sides
                    .iter()
                    .fold(program, |p, &side| p.buffer(if needed { line(name, side) } else { none(name) }));
            }
        }
        program
    }

    /// The buffers with what the owners of matrices need of the bases, in every step.
    pub(super) fn needed(&self, shape: &UnitShape) -> Vec<BufferId> {
        self.of_sides(shape, [TURNS, VALUES])
    }

    /// The buffers with what a step leaves for factors and eigenvalues.
    pub(super) fn left(&self, shape: &UnitShape) -> Vec<BufferId> {
        self.of_sides(shape, [SQUARES, MEANS])
    }

    /// Buffers of all sides with a basis, and further ones where each is whitened by the other.
    fn of_sides(&self, shape: &UnitShape, [first, further]: [BufferId; 2]) -> Vec<BufferId> {
        let sides = self.sides_in(shape);
        let further = if self.whitens(sides) { BASES + further..BASES + further + 2 } else { 0..0 };
        (BASES + first..BASES + first + sides.len()).chain(further).collect()
    }

    /// Appends the stages that keep the factors and compute new bases where they are due.
    pub(super) fn learn(&self, mut program: Program, shape: &UnitShape) -> Program {
        let count = self.sides_in(shape).len();
        if count == 0 {
            return program;
        }
        let at = |first: BufferId| BASES + first..BASES + first + count;
        program = program.local(KEEP, "keep");
        if self.has_states(shape) {
            return program.when_due(|part| part.local(REFRESH, "refresh"));
        }
        program.when_due(|mut part| {
            part = part.local(COPY, "copy");
            for buffer in at(FACTORS).chain(at(TURNS)).chain([BASES + SINCE]) {
                part = part.redistribute(buffer, Target::Whole);
            }
            part = part.local(REFRESH, "refresh");
            part = at(FACTORS).fold(part, Program::release);
            for buffer in at(TURNS).chain([BASES + SINCE]) {
                part = part.redistribute(buffer, Target::Storage);
            }
            part.local(TAKE, "take")
        })
    }
}

pub(super) fn other(side: Side) -> Side {
    if side == Side::Rows { Side::Cols } else { Side::Rows }
}

impl Soap {
    /// Buffers and stages for matrices of a class.
    pub(super) fn compose(&self, shape: &UnitShape) -> Program {
        let (product, left) = (shape.param.arithmetic(), self.bases.left(shape));
        let is_local = self.bases.is_local(shape);
        let like = |name| {
            BufferSpec::new(name, shape.rows, shape.cols, product)
                .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols))
        };
        let second = if is_local { BufferSpec::new("second", 1, 0, product) } else { like("second") };
        let norm = BufferSpec::new("norm", 1, usize::from(self.normalize), DType::F64);
        let norm = if is_local { norm.summed(Side::Rows).summed(Side::Cols) } else { norm };
        let program = Program { exclusive: true, ..self.bases.states_of(shape) };
        let program = program.buffer(like("gradient")).buffer(like("update")).buffer(second).buffer(norm);
        let mut program = self.bases.buffers(program, shape);
        if self.bases.is_owned(shape) {
            program = program.local(LOAD, "load").redistribute(GRADIENT, Target::Whole);
            program = left.iter().chain(&[UPDATE, NORM]).fold(program, |p, &b| p.beside(b, GRADIENT));
            program = self.bases.learn(program.local(STEP, "step"), shape);
            program = left.into_iter().chain([GRADIENT, NORM]).fold(program, Program::release);
            program = program.redistribute(UPDATE, Target::Storage);
            return self.weight_norm.stages(program, shape).local(APPLY, "apply");
        }
        if is_local {
            program = program.local(STEP, "step");
            if self.normalize {
                program = program.redistribute(NORM, Target::Replicate);
            }
        } else {
            program = program.local(LOAD, "load");
            let needed = self.bases.needed(shape);
            for buffer in [GRADIENT, UPDATE, SECOND].into_iter().chain(needed.clone()) {
                program = program.redistribute(buffer, Target::Whole);
            }
            for buffer in left.clone().into_iter().chain([NORM]) {
                program = program.beside(buffer, GRADIENT);
            }
            program = program.local(ROTATE, "rotate");
            program = needed.into_iter().chain([GRADIENT, NORM]).fold(program, Program::release);
            for buffer in [UPDATE, SECOND].into_iter().chain(left) {
                program = program.redistribute(buffer, Target::Storage);
            }
        }
        program = self.weight_norm.stages(program, shape);
        self.bases.learn(program.local(APPLY, "apply"), shape)
    }
}
