//! The launches of a captured step: noted when the step is captured, given the parameters of another step before a
//! replay. Learning rates, gradients and whatever else a launch is told are then those of the step that is taken.

use std::cell::{Cell, RefCell};

use tch::Tensor;

use super::driver::{self, Function, Grid, Node, Stream};
use crate::error::{Error, Result};

/// A launch in a graph.
#[derive(Clone, Copy, Debug)]
struct Noted {
    node: Node,
    function: Function,
    grid: Grid,
}

/// The launches of a captured step, in their order.
#[derive(Clone, Debug, Default)]
pub struct Tape(Vec<Noted>);

/// Mode of this thread's launches.
#[derive(Debug)]
enum Mode {
    /// They are noted as they are captured.
    Note(Tape),
    /// They do not happen: those of an executable graph get their parameters.
    Set { tape: Tape, graph: usize, next: usize },
}

thread_local! {
    static MODE: RefCell<Option<Mode>> = const { RefCell::new(None) };
    /// True if launches stay as they were captured.
    static FROZEN: Cell<bool> = const { Cell::new(false) };
    /// Memory that parameters of a graph name which has still to be launched.
    static HELD: RefCell<Vec<Tensor>> = const { RefCell::new(Vec::new()) };
}

/// Notes the launches of this thread, which are captured, until [`noted`].
pub fn note() {
    MODE.set(Some(Mode::Note(Tape::default())));
}

/// Tape of what was noted; empty where nothing was.
#[must_use]
pub fn noted() -> Tape {
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
    MODE.set(Some(Mode::Set { tape, graph, next: 0 }));
}

/// Ends what [`set`] began.
///
/// # Errors
/// [`Error::Cuda`] where a launch of the graph was left out.
pub fn finish() -> Result<()> {
    match MODE.take() {
        Some(Mode::Set { tape, next, .. }) if next != tape.0.len() => {
            Err(Error::Cuda(format!("the step has {next} launches, the captured one {}", tape.0.len())))
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
        if let Some(Mode::Set { tape, graph, next }) = mode {
            let noted = tape.0.get(*next).filter(|noted| noted.function == function && noted.grid == grid);
            let Noted { node, .. } =
                *noted.ok_or_else(|| Error::Cuda("the step is not the one that was captured".into()))?;
            *next += 1;
            // SAFETY: the caller upholds it; whoever replays the graph keeps it with its nodes.
            return unsafe { driver::set_parameters(*graph, node, function, grid, parameters) };
        }
        // SAFETY: the caller upholds it.
        unsafe { driver::launch(function, grid, stream, parameters) }?;
        if let Some(Mode::Note(tape)) = mode
            && !FROZEN.get()
        {
            tape.0.push(Noted { node: driver::captured_node(stream)?, function, grid });
        }
        Ok(())
    })
}
