//! The CUDA sources, as they are compiled into this crate.

/// One source: its kernels become one module.
#[derive(Debug)]
pub(super) struct Source {
    /// File name.
    pub(super) name: &'static str,
    pub(super) text: &'static str,
    /// Its kernels: each of these, with each of `forms` behind it.
    pub(super) stems: &'static [&'static str],
    pub(super) forms: &'static [&'static str],
    /// Bytes of shared memory that a block may ask for when it is launched.
    pub(super) shared: u32,
}

impl Source {
    /// The names of its kernels.
    pub(super) fn kernels(&self) -> impl Iterator<Item = String> {
        self.stems.iter().flat_map(|stem| self.forms.iter().map(move |form| format!("{stem}_{form}")))
    }
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

/// Elementwise passes, each for small tables of jobs, for large ones and in float64.
pub(super) static UPDATES: Source = Source {
    name: "updates.cu",
    text: include_str!("updates.cu"),
    stems: &[
        "count",
        "momentum",
        "momentum_alone",
        "accumulate",
        "apply",
        "apply_late",
        "convert",
        "release",
        "decay",
        "adamw",
        "adamw_largest",
        "lion",
    ],
    forms: &["few", "many", "wide"],
    shared: 0,
};
/// Symmetric products.
pub(super) static SYMMETRIC_MMA: Source = Source {
    name: "symmetric_mma.cu",
    text: include_str!("symmetric_mma.cu"),
    stems: &["symmetric_mma"],
    forms: &["bfloat16", "float16"],
    shared: 65536,
};
/// What is launched.
pub(super) static SOURCES: [&Source; 2] = [&UPDATES, &SYMMETRIC_MMA];
