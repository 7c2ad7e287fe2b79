//! Rooms of the core that need no libtorch, as they are, and memory for tests of them.

#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, clippy::all, clippy::pedantic)]

// `src/threads` says `rayon`: another crate of that name unless the feature asks for the real one.
#[cfg(not(feature = "rayon"))]
extern crate pool as rayon;

pub mod numbers;

#[path = "../../../../src/error.rs"]
pub mod error;
#[path = "../../../../src/kernels/mod.rs"]
pub mod kernels;
#[path = "../../../../src/spec/mod.rs"]
pub mod spec;
#[path = "../../../../src/tensor/mod.rs"]
pub mod tensor;
#[path = "../../../../src/threads/mod.rs"]
pub mod threads;
