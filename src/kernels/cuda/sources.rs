//! The CUDA sources, as they are compiled into this crate.

/// One source: its kernels become one module.
#[derive(Debug)]
pub(super) struct Source {
    /// File name.
    pub(super) name: &'static str,
    pub(super) text: &'static str,
}

/// Headers by the name under which they are included.
pub(super) const HEADERS: [(&str, &str); 9] = [
    ("common.cuh", include_str!("common.cuh")),
    ("hopper.cuh", include_str!("hopper.cuh")),
    ("jobs.cuh", include_str!("jobs.cuh")),
    ("lamb.cuh", include_str!("lamb.cuh")),
    ("panel.cuh", include_str!("panel.cuh")),
    ("ptx.cuh", include_str!("ptx.cuh")),
    ("swizzle.cuh", include_str!("swizzle.cuh")),
    ("symmetric.cuh", include_str!("symmetric.cuh")),
    ("updates.cuh", include_str!("updates.cuh")),
];

pub(super) static UPDATES: Source = Source { name: "updates.cu", text: include_str!("updates.cu") };
pub(super) static SYMMETRIC_MMA: Source =
    Source { name: "symmetric_mma.cu", text: include_str!("symmetric_mma.cu") };
