//! The optimizers. An algorithm is mathematics on local batches: states, a program, stages.

mod adafactor;
mod apollo;
mod by_matrix;
mod came;
pub mod composed;
mod dion;
mod dion2;
mod elementwise;
mod factored;
mod galore;
mod lamb;
pub mod last_step;
mod low_rank;
mod lr_scale;
mod muon;
mod neuron;
mod norms;
mod orthonormal;
mod soap;
pub mod stage;
mod warned;

use std::fmt::Debug;
use std::sync::Arc;

use composed::Composed;
use dion2::Dion2;
use last_step::LastStep;
use muon::Muon;
use orthonormal::OPTIONS as ORTH;
use stage::StageIo;

pub use norms::{RADIUS, SUMS as NORMS};

use crate::error::{Error, Result};
use crate::kernels::elementwise_optimizers;
use crate::linalg::orthonormalizer::OPTIONS as METHOD;
use crate::program::{BufferId, Program, Stage};
use crate::spec::matrices::OPTIONS as VIEW;
use crate::spec::storage::OPTIONS as STORAGE;
use crate::spec::{
    Block, Description, Hyper, Matrices, OptionValue, Options, ParamSpec, StateSpec, UnitShape,
};

/// Mathematics of one optimizer with the structural settings of one group.
pub trait Algorithm: Debug + Send + Sync {
    /// Name in the group key `algorithm`.
    fn name(&self) -> &'static str;

    /// The live scalars, in the order by which `run` indexes them.
    fn scalars(&self) -> &'static [&'static str];

    /// Tests whether the algorithm is elementwise, so that blocks of any length share a bucket.
    fn flat(&self) -> bool {
        false
    }

    /// Tests whether the algorithm takes parameters of any shape whole, each as one block. Sums over blocks that are
    /// sharded are then made for all of them together, by one collective.
    fn whole_parameter(&self) -> bool {
        false
    }

    /// Tests whether what is done to a block depends on the largest of its parameter: blocks with other ones are not worked on
    /// together then.
    fn sees_largest(&self) -> bool {
        false
    }

    /// Tests whether an algorithm for matrices takes parameters of fewer dimensions too, as matrices of one column.
    fn takes_vectors(&self) -> bool {
        false
    }

    /// Tests whether the algorithm works on a parameter; others go to `adamw`. Asked of the algorithms in `SELECTIVE`.
    fn takes(&self, _p: &ParamSpec) -> bool {
        true
    }

    /// Orientation of matrices whose rows and columns are sharded over the given numbers of processes: true for the
    /// transpose, `None` where it does not depend on the sharding.
    fn orientation(&self, _num_shards: [usize; 2]) -> Option<bool> {
        None
    }

    /// Tests whether the session counts the steps of each parameter in its state `step`.
    fn counted(&self) -> bool {
        false
    }

    /// Tests whether it leaves the last step to its caller for weights whose norms are bound.
    fn leaves_update(&self) -> bool {
        false
    }

    /// Tests, of an elementwise algorithm, whether the decay comes after the update.
    fn is_late(&self) -> bool {
        false
    }

    /// The stage that its caller takes as the last step, where a program has it, and the buffer in which the update lies before
    /// it. `None` where the algorithm takes that step itself, which it may for weights that are free.
    fn update(&self, _class: &UnitShape) -> Option<(Stage, BufferId)> {
        None
    }

    /// Finishes the update in its buffer for the last step.
    ///
    /// # Errors
    /// As `run`.
    fn finish(&self, _io: &mut StageIo<'_>, _hyper: &Hyper) -> Result<()> {
        Ok(())
    }

    /// The last step, of the units that move: it lets go of the others.
    ///
    /// # Errors
    /// As `run`.
    fn last_step(&self, _io: &mut StageIo<'_>, _hyper: &Hyper) -> Result<LastStep> {
        Err(Error::Internal(format!("{} takes its last step itself", self.name())))
    }

    /// The rule by which a parameter is read as matrices.
    fn view(&self, _p: &ParamSpec) -> Matrices {
        Matrices::stacked()
    }

    /// Tests whether products of libtorch read gradients in their own memory: the gradients of a captured step must then
    /// keep their addresses.
    fn multiplies_gradients(&self) -> bool {
        false
    }

    /// Tests whether a replay of a captured step repeats a step of parameters that are, where `encoded`, more than numbers
    /// of their type. Where it does not, every step is taken without the graph.
    fn replays(&self, _encoded: bool) -> bool {
        true
    }

    /// Tests whether the guarded parts of the program (`Program::when_due`) run in a step before which the parameter
    /// with this stream has taken `steps`.
    fn due(&self, _stream: u64, _steps: f64) -> bool {
        true
    }

    /// Index of the state that is 0 until the matrix's first refresh: until then the guarded parts run whatever `due`
    /// returns. The state is equal on all processes that work on the matrix.
    fn first_refresh(&self) -> Option<usize> {
        None
    }

    /// Number of leading dimensions that count the matrices of a parameter; the next one holds their rows, the rest
    /// their columns (`columns`).
    fn leading(&self, p: &ParamSpec) -> usize {
        self.view(p).leading(p)
    }

    /// The first dimension that holds columns of a parameter's matrices. Those between it and the leading ones hold their rows;
    /// that is one, unless dimensions are merged.
    fn columns(&self, p: &ParamSpec) -> usize {
        self.view(p).columns(p)
    }

    /// Splits the parameter into blocks.
    ///
    /// # Errors
    /// `Error::Value` for a shape that the algorithm does not take.
    fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        self.view(p).blocks(p)
    }

    /// The states kept for a parameter.
    ///
    /// # Errors
    /// `Error::Value` for settings that do not fit the shape.
    fn state(&self, p: &ParamSpec, blocks: &[Block]) -> Result<Vec<StateSpec>>;

    /// Buffers, stages and placement changes for a bucket of this class.
    ///
    /// # Errors
    /// `Error::Value` for sizes beyond what can be addressed.
    fn program(&self, shape: &UnitShape) -> Result<Program>;

    /// As `program`, with all that needs more than one shard of a matrix inside `Program::gathered`, so that some axes can be
    /// gathered instead of kept; `None` where there is nothing to choose, which does not depend on `num_shards`: of this shape
    /// these are what the axes that are kept make.
    ///
    /// # Errors
    /// As `program`.
    fn gathered_program(&self, _shape: &UnitShape) -> Result<Option<Program>> {
        Ok(None)
    }

    /// Runs a stage on the shards that this process holds. Writes parameters, states and buffers in place.
    ///
    /// # Errors
    /// Whatever libtorch or a kernel says.
    fn run(&self, stage: Stage, io: &mut StageIo<'_>, hyper: &Hyper) -> Result<()>;

    /// Description for `explain()` of blocks whose rows and columns are sharded over `num_shards` processes.
    fn describe(&self, p: &ParamSpec, blocks: &[Block], num_shards: [usize; 2]) -> Description;
}

/// Any algorithm, with its last step.
pub type AnyAlgorithm = Arc<Composed>;

/// An entry of the tables below.
struct Entry {
    name: &'static str,
    /// The structural settings that it reads.
    options: &'static [&'static [&'static str]],
    /// States that torch, or the optimizer's authors, call by another name than the core, with that name.
    states: &'static [&'static [(&'static str, &'static str)]],
    new: fn(&Options) -> Result<Box<dyn Algorithm>>,
}

const TABLE: &[Entry] = &[
    Entry {
        name: "adafactor",
        options: &[&adafactor::OPTIONS, &STORAGE],
        states: &[&MOMENTS, &FACTORS],
        new: |o| Ok(Box::new(adafactor::Adafactor::new(o)?)),
    },
    Entry {
        name: "apollo_adamw",
        options: &[&low_rank::OPTIONS, &apollo::OPTIONS, &STORAGE],
        states: &[&MOMENTS],
        new: |o| Ok(Box::new(apollo::Apollo::new(o)?)),
    },
    Entry {
        name: "came",
        options: &[&came::OPTIONS, &STORAGE],
        states: &[&MOMENTS, &FACTORS, &came::STATES],
        new: |o| Ok(Box::new(came::Came::new(o)?)),
    },
    Entry {
        name: "dion",
        options: &[&dion::OPTIONS, &STORAGE, &VIEW],
        states: &[],
        new: |o| Ok(Box::new(dion::Dion::new(o)?)),
    },
    Entry {
        name: "dion2",
        options: &[&dion2::OPTIONS, &ORTH, &STORAGE, &METHOD, &VIEW],
        states: &[],
        new: |o| Ok(Box::new(Dion2::new(o)?)),
    },
    Entry {
        name: "galore_adamw",
        options: &[&low_rank::OPTIONS, &galore::OPTIONS, &STORAGE],
        states: &[&MOMENTS],
        new: |o| Ok(Box::new(galore::GaLore::new(o)?)),
    },
    Entry {
        name: "lamb",
        options: &[&lamb::OPTIONS, &STORAGE],
        states: &[&MOMENTS],
        new: |o| Ok(Box::new(lamb::Lamb::new(o)?)),
    },
    Entry {
        name: "muon",
        options: &[&muon::OPTIONS, &ORTH, &STORAGE, &METHOD, &VIEW],
        states: &[],
        new: |o| Ok(Box::new(Muon::new(o)?)),
    },
    Entry {
        name: "nordion2",
        options: &[&dion2::OPTIONS, &neuron::OPTIONS, &ORTH, &STORAGE, &METHOD, &VIEW],
        states: &[],
        new: |o| Ok(Box::new(Dion2::normalized(o)?)),
    },
    Entry {
        name: "normuon",
        options: &[&muon::OPTIONS, &neuron::OPTIONS, &ORTH, &STORAGE, &METHOD, &VIEW],
        states: &[],
        new: |o| Ok(Box::new(Muon::normalized(o)?)),
    },
    Entry {
        name: "soap",
        options: &[&soap::OPTIONS, &soap::BASIS, &STORAGE, &VIEW],
        states: &[&MOMENTS],
        new: |o| Ok(Box::new(soap::Soap::new(o)?)),
    },
    Entry {
        name: "soap_muon",
        options: &[&soap::MUON, &soap::BASIS, &ORTH, &STORAGE, &METHOD, &VIEW],
        states: &[&[("variance", "exp_avg_sq")]],
        new: |o| Ok(Box::new(soap::SoapMuon::new(o)?)),
    },
];

/// torch's names of moments.
const MOMENTS: [(&str, &str); 2] = [("momentum", "exp_avg"), ("variance", "exp_avg_sq")];
/// torch's names of second moments by row and by column.
const FACTORS: [(&str, &str); 3] =
    [("row", "exp_avg_sq_row"), ("col", "exp_avg_sq_col"), ("mean", "exp_avg_sq_mean")];

macro_rules! algorithms {
    ($($name:ident)*) => {
        $( mod $name; )*

        /// The elementwise algorithms.
        const ELEMENTWISE: &[Entry] = &[$( $name::ENTRY ),*];
    };
}
elementwise_optimizers!(algorithms);

fn table() -> impl Iterator<Item = &'static Entry> {
    ELEMENTWISE.iter().chain(TABLE)
}

/// The algorithms that leave some parameters to `adamw`.
const SELECTIVE: [&str; 2] = ["apollo_adamw", "galore_adamw"];

/// The algorithm of what others leave.
pub const FALLBACK: &str = "adamw";

/// Structural settings of every group. The plan itself reads most of them.
const COMMON: [&str; 10] = [
    "capturable",
    "cautious_wd",
    "average",
    "average_dtype",
    "strict",
    "max_batch_bytes",
    "workspace_limit",
    "stochastic_rounding",
    "master_weights",
    "seed",
];

/// The keys of a group of this algorithm that shape the plan, each once, in a fixed order. Those of `AdamW` are among
/// them: it takes what other algorithms do not.
#[must_use]
pub fn option_keys(name: &str) -> Vec<&'static str> {
    let read = table().filter(|e| e.name == name || e.name == FALLBACK);
    let own = read.flat_map(|e| e.options.iter().copied().flatten().copied());
    let mut keys: Vec<_> = own.chain(COMMON).chain(norms::OPTIONS).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// The names of all algorithms.
#[must_use]
pub fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = table().map(|e| e.name).collect();
    names.sort_unstable();
    names
}

/// Of each algorithm the states that torch, or the optimizer's authors, call by another name than the core, with that name.
pub fn state_names() -> impl Iterator<Item = (&'static str, Vec<(&'static str, &'static str)>)> {
    table().map(|e| (e.name, e.states.iter().copied().flatten().copied().collect()))
}

fn entry(name: &str) -> Result<&'static Entry> {
    table()
        .find(|e| e.name == name)
        .ok_or_else(|| Error::Value(format!("algorithm must be one of {}, got '{name}'", names().join(", "))))
}

/// The algorithm of this name with these settings.
///
/// # Errors
/// `Error::Value` for an unknown name or settings that it refuses.
pub fn build(name: &str, options: &Options) -> Result<AnyAlgorithm> {
    Ok(Arc::new(Composed::new(name, options)?))
}

/// Settings of weights that the group's algorithm leaves to another one: they are free.
pub fn release(options: &mut Options) {
    options.insert(norms::RULE, OptionValue::Str("free".into()));
}

/// The algorithm that optimizes this parameter: the group's, or `AdamW` for a parameter that is no matrix in a group
/// that allows it (`strict=False`).
///
/// # Errors
/// As `build`.
pub fn name_for(group: &str, p: &ParamSpec, options: &Options) -> Result<&'static str> {
    let found = entry(group)?;
    if !options.flag("strict")? && p.shape.len() < 2 && !any_shape((found.new)(options)?.as_ref()) {
        log::info!(target: "oxidion.plan", "{}: shape {:?} is no matrix, optimized by adamw", p.name, p.shape);
        return Ok(FALLBACK);
    }
    if SELECTIVE.contains(&found.name) && !(found.new)(options)?.takes(p) {
        return Ok(FALLBACK);
    }
    Ok(found.name)
}

/// Tests whether an algorithm takes parameters that are no matrices.
fn any_shape(algorithm: &dyn Algorithm) -> bool {
    algorithm.flat() || algorithm.whole_parameter() || algorithm.takes_vectors()
}

/// One block that is the whole parameter.
fn whole(p: &ParamSpec) -> Vec<Block> {
    vec![Block { rows: 1, cols: p.numel(), ..Block::default() }]
}

/// One block that stands for the matrices over the last two dimensions of a parameter, one element where it has fewer.
fn whole_matrices(p: &ParamSpec) -> Vec<Block> {
    let [rows, cols] = match p.shape.as_slice() {
        [.., rows, cols] => [*rows, *cols],
        _ => [1, 1],
    };
    vec![Block { rows, cols, ..Block::default() }]
}

/// Floating-point operations as `explain()` prints them.
#[allow(clippy::cast_precision_loss)] // printed with three digits
fn flops(operations: usize) -> f64 {
    operations as f64
}

/// The same of products of three sides, which an integer of 64 bits may not hold.
#[allow(clippy::cast_precision_loss)] // printed with three digits
fn wide_flops(operations: u128) -> f64 {
    operations as f64
}
