//! Dion2: the strongest rows or columns of the momentum orthonormalized, with error feedback (arXiv:2512.16928).
//! `NorDion2` (Dion3) takes rows and normalizes their neurons as `NorMuon` does.
//!
//! M ← M + G, K = the k slices of M with the largest sums of absolute values, U = orth(M[K]), M[K] ← μ·M[K],
//! X ← (1-lr·λ)X, X[K] ← X[K] - lr·s·U with s from the block's whole shape.
//!
//! With `selection_scope` "global" K is chosen among all slices. With "local" each process chooses among the slices
//! that it stores and all chosen ones are orthonormalized together: fewer bytes are sent, and K depends on the layout.

mod stages;

use super::Algorithm;
use super::last_step::LastStep;
use super::neuron::{ChosenRows, NORMALIZE, Neuron, SQUARES};
use super::orthonormal::{APPLY, BETA2, EPSILON, MOMENTUM, MU, ORTHONORMALIZE, Orthonormal, PREPARE, U};
use super::stage::StageIo;
use crate::error::{Error, Result};
use crate::program::{BufferId, BufferSpec, Program, Stage, Target};
use crate::spec::{
    Block, Description, DimSharding, Hyper, Matrices, Options, ParamSpec, Side, StateSpec, UnitShape,
};
use crate::tensor::DType;

pub(super) const OPTIONS: [&str; 2] = ["fraction", "selection_scope"];

const SCALARS: [&str; 4] = ["lr", "ef_decay", "weight_decay", "epsilon"];
const NORMALIZED_SCALARS: [&str; 5] = ["lr", "mu", "weight_decay", "epsilon", "muon_beta2"];

const SPREAD: Stage = 3;
const SELECT: Stage = 4;

const SUMS: BufferId = 2;
const CHOSEN: BufferId = 3;
const SCORES: BufferId = 4;
const SUBMATRIX: BufferId = 5;
const NEURON_BUFFERS: usize = 6;

#[derive(Debug)]
pub(super) struct Dion2 {
    common: Orthonormal,
    fraction: f64,
    global: bool,
    neuron: Option<Neuron>,
}

/// Selection of slices of the blocks of a class.
struct Selection {
    side: Side,
    /// Number of slices that each process chooses.
    count: usize,
    /// True if a process chooses among the slices of all processes.
    global: bool,
}

impl Selection {
    /// Chosen slices: their buffer, their positions and their side.
    fn rows(&self) -> ChosenRows {
        ChosenRows { buffer: CHOSEN, in_place: self.global, side: self.side }
    }
}

impl Dion2 {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let global = options.either("selection_scope", "local", "global")?;
        let fraction = options.share("fraction")?;
        Ok(Self { common: Orthonormal::new(options)?, fraction, global, neuron: None })
    }

    pub(super) fn normalized(options: &Options) -> Result<Self> {
        Ok(Self { neuron: Some(Neuron::new(options, NEURON_BUFFERS)?), ..Self::new(options)? })
    }

    /// ⌈fraction · size⌉, at least one.
    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a matrix side
    fn count(&self, size: usize) -> usize {
        ((self.fraction * size as f64).ceil() as usize).clamp(1, size.max(1))
    }

    /// Rows where neurons are normalized. Else the side that is sharded where the choice is local, or the shorter one.
    fn select(&self, [rows, cols]: [usize; 2], num_shards: [usize; 2]) -> Selection {
        let shorter = if rows <= cols { Side::Rows } else { Side::Cols };
        // Blocks of a parameter are not in equal parts on all processes: each chooses among all its slices.
        let whole = self.global || self.common.view.splits().is_some();
        let side = match num_shards {
            _ if self.neuron.is_some() => Side::Rows,
            [num_shards, 1] if num_shards > 1 && !whole => Side::Rows,
            [1, num_shards] if num_shards > 1 && !whole => Side::Cols,
            _ => shorter,
        };
        let (slices, sharers) = ([rows, cols][side.index()], num_shards[side.index()]);
        let global = whole && sharers > 1;
        Selection { side, count: self.count(if global { slices } else { slices.div_ceil(sharers) }), global }
    }

    /// Tests whether chosen slices, which lie side by side, are brought to their places in a matrix of zeros: the norms of
    /// weights are those of whole matrices.
    fn spreads(shape: &UnitShape, global: bool) -> bool {
        !global && shape.bound.is_some()
    }

    /// Updates whose neurons are normalized, where they are to be.
    fn scale(&self, io: &mut StageIo<'_>, rows: Option<ChosenRows>) -> Result<()> {
        self.neuron.as_ref().map_or(Ok(()), |neuron| neuron.scale(io, rows))
    }

    /// Size of the part of a block that is orthonormalized.
    fn size(&self, [rows, cols]: [usize; 2], num_shards: [usize; 2]) -> [usize; 2] {
        let Selection { side, count, global } = self.select([rows, cols], num_shards);
        let all = if global { count } else { count * num_shards[side.index()] };
        if side == Side::Rows { [all, cols] } else { [rows, all] }
    }
}

impl Algorithm for Dion2 {
    fn name(&self) -> &'static str {
        if self.neuron.is_some() { "nordion2" } else { "dion2" }
    }

    fn scalars(&self) -> &'static [&'static str] {
        if self.neuron.is_some() { &NORMALIZED_SCALARS } else { &SCALARS }
    }

    fn view(&self, _p: &ParamSpec) -> Matrices {
        self.common.view.clone()
    }

    fn replays(&self, _encoded: bool) -> bool {
        self.common.replays()
    }

    fn leaves_update(&self) -> bool {
        true
    }

    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>> {
        Ok(self.common.states(p, blocks, self.neuron.as_ref()))
    }

    fn program(&self, shape: &UnitShape) -> Result<Program> {
        let (rows, cols, dtype) = (shape.rows, shape.cols, self.common.product(shape.param));
        let Selection { side, count, global } = self.select([rows, cols], shape.num_shards);
        let with = [DimSharding::LikeParam(Side::Rows), DimSharding::LikeParam(Side::Cols)];
        let chosen = self.size([rows, cols], shape.num_shards);
        // Of the slices that all processes chose, each has its own ones.
        let spread = match side {
            Side::Rows => [DimSharding::Even(Side::Rows), with[1]],
            Side::Cols => [with[0], DimSharding::Even(Side::Cols)],
        };
        let (size, sharding) = if global { ([rows, cols], with) } else { (chosen, spread) };
        let sums = match side {
            Side::Rows => BufferSpec::new("sums", rows, 1, DType::F64)
                .sharded(with[0], DimSharding::Replicated)
                .summed(Side::Cols),
            Side::Cols => BufferSpec::new("sums", 1, cols, DType::F64)
                .sharded(DimSharding::Replicated, with[1])
                .summed(Side::Rows),
        };
        let (scores, submatrix) =
            if global { ([rows, cols][side.index()], chosen[0] * chosen[1]) } else { (0, 0) };
        let program = Program::new()
            .buffer(BufferSpec::new("u", size[0], size[1], dtype).sharded(sharding[0], sharding[1]));
        let mut program = self
            .common
            .scratch(program, shape, chosen, dtype)?
            .buffer(sums)
            .buffer(BufferSpec::new("chosen", 1, count, DType::F64))
            .buffer(BufferSpec::new("scores", 1, scores, DType::F64).summed(side));
        program = Orthonormal::room(program, shape, "submatrix", submatrix, dtype);
        if self.neuron.is_some() {
            // Neurons that a process chose among its own are no part of a whole.
            let (neurons, sharding) = if global { (rows, with[0]) } else { (count, DimSharding::Replicated) };
            program = Neuron::buffers(program, shape, neurons, sharding);
        }
        if shape.state[MOMENTUM].is_quantized() || Self::spreads(shape, global) {
            let full = BufferSpec::new("full", rows, cols, shape.param.arithmetic());
            program = program.buffer(full.sharded(with[0], with[1]));
        }
        program = program.local(PREPARE, "accumulate").redistribute(SUMS, Target::Replicate);
        if global {
            program = program.local(SPREAD, "spread").redistribute(SCORES, Target::Replicate);
        }
        program = program
            .local(SELECT, "select")
            .redistribute(U, Target::Whole)
            .local(ORTHONORMALIZE, "orthonormalize")
            .redistribute(U, Target::Storage);
        if let Some(neuron) = &self.neuron {
            program = neuron.stages(program, shape);
        }
        Ok(program.local(APPLY, "apply"))
    }

    fn run(&self, stage: Stage, io: &mut StageIo<'_>, h: &Hyper) -> Result<()> {
        let selection = self.select([io.class.rows, io.class.cols], io.class.num_shards);
        let rows = Some(selection.rows());
        match (stage, &self.neuron) {
            (PREPARE, _) => self.prepare(io, selection.side),
            (SPREAD, _) => Self::spread(io, selection.side),
            (SELECT, _) => self.choose(io, &selection, h[MU]),
            (ORTHONORMALIZE, _) if selection.global => self.orthonormalize_chosen(io, &selection, h[EPSILON]),
            (ORTHONORMALIZE, _) => self.common.orthonormalize(io, h[EPSILON], None),
            (SQUARES, Some(neuron)) => neuron.squares(io, rows),
            (NORMALIZE, Some(neuron)) => neuron.update(io, h[BETA2], rows),
            (APPLY, _) => {
                self.scale(io, rows)?;
                self.apply(io, &selection, h)
            }
            _ => Err(Error::Internal(format!("{} has no stage {stage}", self.name()))),
        }
    }

    fn update(&self, class: &UnitShape) -> Option<(Stage, BufferId)> {
        let is_global = self.select([class.rows, class.cols], class.num_shards).global;
        class.bound.map(|_| (APPLY, if is_global { U } else { self.full() }))
    }

    fn finish(&self, io: &mut StageIo<'_>, _h: &Hyper) -> Result<()> {
        let selection = self.select([io.class.rows, io.class.cols], io.class.num_shards);
        self.scale(io, Some(selection.rows()))?;
        if selection.global { Ok(()) } else { self.bring_to_places(io, &selection) }
    }

    fn last_step(&self, io: &mut StageIo<'_>, h: &Hyper) -> Result<LastStep> {
        Ok(self.common.last_step(io.class, h))
    }

    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description {
        self.common.describe(p, blocks, |b| self.size([b.rows, b.cols], num_shards))
    }
}
