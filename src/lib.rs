//! The core of oxidion: plans optimizer steps, and computes them.
//!
//! Data flows one way: parameters → specs → plan → stages → apply. `algorithm` is mathematics, `layout` is geometry,
//! `plan` joins them, `session` runs the result, `binding` is the border to Python.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod algorithm;
pub mod error;
pub mod kernels;
pub mod layout;
pub mod linalg;
pub mod plan;
pub mod program;
pub mod session;
pub mod spec;
pub mod tensor;
pub mod threads;

#[cfg(feature = "python")]
mod binding;
