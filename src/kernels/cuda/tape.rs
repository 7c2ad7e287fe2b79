//! The launches of a captured step. They are recorded when the step is captured, and get the parameters of another step
//! before a replay. Learning rates, gradients and all other arguments of a launch are then those of the step that is taken.
//!
//! Parameters are replaced by `cuGraphExecKernelNodeSetParams`. A driver that cannot do that, or cannot report which node a
//! launch became, is refused before a capture. Arguments of libtorch's operations keep their values from the capture (the
//! epsilon of an orthonormalization); scalars that change go through [`live_numbers`].

use std::cell::{Cell, RefCell};

use tch::Tensor;

use super::driver::{self, Function, Grid, Node, Stream};
use crate::error::{Error, Result};
use crate::tensor::FlatView;

/// A launch in a graph.
#[derive(Clone, Copy, Debug)]
struct Noted {
    node: Node,
    function: Function,
    grid: Grid,
}

/// The launches of a captured step, and the memory of the scalars that libtorch computes with, in their order.
#[derive(Clone, Debug, Default)]
pub struct Tape {
    launches: Vec<Noted>,
    numbers: Vec<FlatView<'static>>,
}

/// Mode of this thread's launches.
#[derive(Debug)]
enum Mode {
    /// They are noted as they are captured.
    Note(Tape),
    /// They do not happen: those of an executable graph get their parameters.
    Set { tape: Tape, graph: usize, next: usize, next_numbers: usize },
}

thread_local! {
    static MODE: RefCell<Option<Mode>> = const { RefCell::new(None) };
    /// True if launches keep the parameters that they were captured with.
    static FROZEN: Cell<bool> = const { Cell::new(false) };
    /// Memory that torch must not give to others before a step is captured, or before a graph that names it is launched.
    static HELD: RefCell<Vec<Tensor>> = const { RefCell::new(Vec::new()) };
}

/// Notes the launches of this thread, which are captured, until [`noted`].
pub fn note() {
    let_go();
    MODE.set(Some(Mode::Note(Tape::default())));
}

/// Tape of what was noted; empty where nothing was.
#[must_use]
pub fn noted() -> Tape {
    // What was allocated in a capture belongs to its graph.
    let_go();
    match MODE.take() {
        Some(Mode::Note(tape)) => tape,
        _ => Tape::default(),
    }
}

/// Instead of launching, gives the launches of an executable graph the parameters that this thread launches with, until
/// [`finish`]. Scratch that they name stays until [`let_go`], which is called when the graph has been launched: torch's
/// allocator would give it to another thread.
pub fn set(tape: Tape, graph: usize) {
    let_go();
    MODE.set(Some(Mode::Set { tape, graph, next: 0, next_numbers: 0 }));
}

/// Ends what [`set`] began.
///
/// # Errors
/// [`Error::Cuda`] where a launch of the graph was left out.
pub fn finish() -> Result<()> {
    match MODE.take() {
        Some(Mode::Set { tape: Tape { launches, .. }, next, .. }) if next != launches.len() => {
            Err(Error::Cuda(format!("the step has {next} launches, the captured one {}", launches.len())))
        }
        _ => Ok(()),
    }
}

/// Keeps scratch that parameters of a graph may name.
pub(super) fn hold(room: &Tensor) {
    if is_set() {
        HELD.with_borrow_mut(|held| held.push(room.shallow_clone()));
    }
}

/// Gives the scratch back that was kept since [`set`].
pub fn let_go() {
    drop(HELD.take());
}

/// Tests whether this thread gives launches of a graph their parameters instead of launching.
fn is_set() -> bool {
    MODE.with_borrow(|mode| matches!(mode, Some(Mode::Set { .. })))
}

/// Does work that a replay repeats as it was captured: products of libtorch, with the launches between them.
///
/// # Errors
/// Whatever the work returns.
pub(in super::super) fn frozen(work: impl FnOnce() -> Result<()>) -> Result<()> {
    if is_set() {
        return Ok(());
    }
    let outer = FROZEN.replace(true);
    let done = work();
    FROZEN.set(outer);
    done
}

/// Returns memory for `count` float64 scalars of a step that is captured for replays: a replay has the same memory. None
/// where no such step is captured or replayed, and in work that a replay repeats as it was captured. `room` allocates it.
pub(in super::super) fn live_numbers(
    count: usize,
    room: impl FnOnce() -> Result<(Tensor, FlatView<'static>)>,
) -> Result<Option<FlatView<'static>>> {
    let known = MODE.with_borrow_mut(|mode| match mode {
        Some(Mode::Set { tape, next_numbers, .. }) => {
            let found = tape.numbers.get(*next_numbers).filter(|numbers| numbers.len() == count).copied();
            *next_numbers += 1;
            found.map(Some).ok_or_else(|| Error::Cuda("the step is not the one that was captured".into()))
        }
        _ => Ok(None),
    })?;
    let notes = MODE.with_borrow(|mode| matches!(mode, Some(Mode::Note(_))));
    if known.is_some() || !notes || FROZEN.get() {
        return Ok(known);
    }
    let (memory, numbers) = room()?;
    HELD.with_borrow_mut(|held| held.push(memory));
    MODE.with_borrow_mut(|mode| {
        if let Some(Mode::Note(tape)) = mode {
            tape.numbers.push(numbers);
        }
    });
    Ok(Some(numbers))
}

/// Launches a kernel, or does what this thread does instead.
///
/// # Safety
/// As [`driver::launch`] and [`driver::set_parameters`].
pub(super) unsafe fn launch<Parameters>(
    function: Function,
    grid: Grid,
    stream: Stream,
    parameters: &Parameters,
) -> Result<()> {
    MODE.with_borrow_mut(|mode| {
        if let Some(Mode::Set { tape, graph, next, .. }) = mode {
            let noted =
                tape.launches.get(*next).filter(|noted| noted.function == function && noted.grid == grid);
            let Noted { node, .. } =
                *noted.ok_or_else(|| Error::Cuda("the step is not the one that was captured".into()))?;
            *next += 1;
            // SAFETY: the caller upholds it; the code that replays the graph keeps it with its nodes.
            return unsafe { driver::set_parameters(*graph, node, function, grid, parameters) };
        }
        // SAFETY: the caller upholds it.
        unsafe { driver::launch(function, grid, stream, parameters) }?;
        if let Some(Mode::Note(tape)) = mode
            && !FROZEN.get()
        {
            tape.launches.push(Noted { node: driver::captured_node(stream)?, function, grid });
        }
        Ok(())
    })
}
