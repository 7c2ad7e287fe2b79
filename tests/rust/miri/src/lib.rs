//! Rooms of the core that need no libtorch, as they are.

#![allow(dead_code, unused_imports, unreachable_pub, missing_docs, clippy::all, clippy::pedantic)]

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
