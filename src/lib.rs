//! The core of oxidion: plans optimizer steps, and computes them.
//!
//! Data flows one way: parameters → specs → plan → stages → apply. `algorithm` is mathematics, `layout` is geometry,
//! `plan` joins them, `session` runs the result, `binding` is the border to Python.

#![cfg_attr(test, allow(clippy::unwrap_used))]
// Rooms are public for the tests of the repository only (feature `internals`), and some of what they have is for tests.
#![cfg_attr(not(feature = "internals"), allow(unreachable_pub, unused_imports, dead_code))]

#[cfg(not(feature = "internals"))]
mod algorithm;
#[cfg(feature = "internals")]
pub mod algorithm;
#[cfg(not(feature = "internals"))]
mod error;
#[cfg(feature = "internals")]
pub mod error;
#[cfg(not(feature = "internals"))]
mod kernels;
#[cfg(feature = "internals")]
pub mod kernels;
#[cfg(not(feature = "internals"))]
mod layout;
#[cfg(feature = "internals")]
pub mod layout;
#[cfg(not(feature = "internals"))]
mod linalg;
#[cfg(feature = "internals")]
pub mod linalg;
#[cfg(not(feature = "internals"))]
mod plan;
#[cfg(feature = "internals")]
pub mod plan;
#[cfg(not(feature = "internals"))]
mod program;
#[cfg(feature = "internals")]
pub mod program;
#[cfg(not(feature = "internals"))]
mod session;
#[cfg(feature = "internals")]
pub mod session;
#[cfg(not(feature = "internals"))]
mod spec;
#[cfg(feature = "internals")]
pub mod spec;
#[cfg(not(feature = "internals"))]
mod tensor;
#[cfg(feature = "internals")]
pub mod tensor;
#[cfg(not(feature = "internals"))]
mod threads;
#[cfg(feature = "internals")]
pub mod threads;

#[cfg(feature = "python")]
mod binding;
