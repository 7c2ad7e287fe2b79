//! The program of SOAP.

use super::Soap;
use super::basis::Bases;
use super::layout::{
    APPLY, BASES, COPY, FACTORS, GRADIENT, KEEP, LOAD, NORM, REFRESH, SINCE_BUFFER, SQUARES, STEP, TAKE,
    TURNS, UPDATE,
};
use crate::program::{BufferId, BufferSpec, Program, Target};
use crate::spec::{DimSharding, Side, UnitShape};
use crate::tensor::DType;

impl Bases {
    /// The program with the buffers of the bases.
    pub(super) fn buffers(&self, mut program: Program, shape: &UnitShape) -> Program {
        let (sides, product) = (self.sides_in(shape), shape.param.arithmetic());
        let none = |name| BufferSpec::new(name, 1, 0, product);
        let length = |side: Side| [shape.rows, shape.cols][side.index()];
        let square = |name, side| BufferSpec::new(name, length(side), length(side), product);
        let moves = !sides.is_empty() && !self.has_states(shape);
        program = program.buffer(if moves { BufferSpec::new("since", 1, 1, product) } else { none("since") });
        for (name, needed) in [("squares", true), ("factor", moves), ("basis", moves)] {
            for i in 0..2 {
                let side = sides.get(i).filter(|_| needed);
                program = program.buffer(side.map_or(none(name), |&side| {
                    let spec = square(name, side);
                    if name == "factor" { spec.summed(side.other()) } else { spec }
                }));
            }
        }
        program
    }

    /// The buffers with what a step leaves for factors.
    pub(super) fn left(&self, shape: &UnitShape) -> Vec<BufferId> {
        (BASES + SQUARES..BASES + SQUARES + self.sides_in(shape).len()).collect()
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
            for buffer in at(FACTORS).chain(at(TURNS)).chain([BASES + SINCE_BUFFER]) {
                part = part.redistribute(buffer, Target::Whole);
            }
            part = part.local(REFRESH, "refresh");
            part = at(FACTORS).fold(part, Program::release);
            for buffer in at(TURNS).chain([BASES + SINCE_BUFFER]) {
                part = part.redistribute(buffer, Target::Storage);
            }
            part.local(TAKE, "take")
        })
    }
}

impl Soap {
    /// Buffers and stages for matrices of a class.
    pub(super) fn compose(&self, shape: &UnitShape) -> Program {
        let product = shape.param.arithmetic();
        let like = |name| {
            BufferSpec::new(name, shape.rows, shape.cols, product)
                .sharded(DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols))
        };
        let is_owned = self.bases.is_owned(shape);
        let norm = BufferSpec::new("norm", 1, usize::from(self.normalize), DType::F64);
        let norm = if is_owned { norm } else { norm.summed(Side::Rows).summed(Side::Cols) };
        let program = Program { exclusive: true, ..self.bases.states_of(shape) };
        let program = program.buffer(like("gradient")).buffer(like("update")).buffer(norm);
        let mut program = self.bases.buffers(program, shape);
        if !is_owned {
            program = program.local(STEP, "step");
            if self.normalize {
                program = program.redistribute(NORM, Target::Replicate);
            }
            return self.bases.learn(program.local(APPLY, "apply"), shape);
        }
        let left = self.bases.left(shape);
        program = program.local(LOAD, "load").redistribute(GRADIENT, Target::Whole);
        program = left.iter().chain(&[UPDATE, NORM]).fold(program, |p, &b| p.same_placement_as(b, GRADIENT));
        program = self.bases.learn(program.local(STEP, "step"), shape);
        program = left.into_iter().chain([GRADIENT, NORM]).fold(program, Program::release);
        program = program.redistribute(UPDATE, Target::Storage);
        program.local(APPLY, "apply")
    }
}
