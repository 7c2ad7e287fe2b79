//! The CUDA sources, as they are compiled into this crate.

use std::borrow::Cow;
use std::sync::OnceLock;

use super::cuda::{self, Entered, Source, Sources, State, When};
use super::headers::{generated, stems};
use super::op::Family;
use super::ops::{columns::panel, symmetric::device as symmetric};
use crate::error::{Error, Result};

/// Headers by the name under which they are included; those of operations are declared with them.
const HEADERS: &[(&str, &str)] = &[
    ("arithmetic.cuh", include_str!("cuda/src/arithmetic.cuh")),
    ("block_sum.cuh", include_str!("cuda/src/block_sum.cuh")),
    ("blocks.cuh", include_str!("cuda/src/blocks.cuh")),
    ("quantized.cuh", include_str!("cuda/src/quantized.cuh")),
    ("common.cuh", include_str!("cuda/src/common.cuh")),
    ("hopper.cuh", include_str!("cuda/src/hopper.cuh")),
    ("jobs.cuh", include_str!("cuda/src/jobs.cuh")),
    ("lines.cuh", include_str!("cuda/src/lines.cuh")),
    ("master.cuh", include_str!("cuda/src/master.cuh")),
    ("normal.cuh", include_str!("cuda/src/normal.cuh")),
    ("panel.cuh", include_str!("cuda/src/panel.cuh")),
    ("philox.cuh", include_str!("cuda/src/philox.cuh")),
    ("ptx.cuh", include_str!("cuda/src/ptx.cuh")),
    ("rounding.cuh", include_str!("cuda/src/rounding.cuh")),
    ("search.cuh", include_str!("cuda/src/search.cuh")),
    ("stacks.cuh", include_str!("cuda/src/stacks.cuh")),
    ("summed.cuh", include_str!("cuda/src/summed.cuh")),
    ("swizzle.cuh", include_str!("cuda/src/swizzle.cuh")),
    ("symmetric.cuh", include_str!("cuda/src/symmetric.cuh")),
    ("unfused.cuh", include_str!("cuda/src/unfused.cuh")),
];

/// Elementwise passes, each for small tables of jobs, for large ones and in float64.
static UPDATES: Source = Source {
    name: "updates.cu",
    text: include_str!("cuda/src/updates.cu"),
    stems: || stems(Family::Elementwise, false),
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
    seconds: 10.5,
};
/// Symmetric products.
static SYMMETRIC_MMA: Source = Source {
    name: "symmetric_mma.cu",
    text: include_str!("cuda/src/symmetric_mma.cu"),
    stems: || vec!["symmetric_mma", "symmetric_mma_part", "symmetric_mma_total"],
    forms: &["bfloat16", "float16"],
    shared: symmetric::SHARED,
    when: When::Always,
    seconds: 2.0,
};
/// The same by the instructions of warpgroups.
static SYMMETRIC_WGMMA: Source = Source {
    name: "symmetric_wgmma.cu",
    text: include_str!("cuda/src/symmetric_wgmma.cu"),
    stems: || vec!["symmetric_wgmma"],
    forms: &["bfloat16", "float16"],
    shared: symmetric::GROUP_SHARED,
    when: symmetric::GROUPS,
    seconds: 4.1,
};
/// Elementwise passes over block-quantized values and stochastically rounded numbers.
static QUANTIZED: Source = Source {
    name: "quantized.cu",
    text: include_str!("cuda/src/quantized.cu"),
    stems: || stems(Family::Elementwise, true),
    forms: &["quantized_many", "quantized_wide"],
    shared: 0,
    when: When::Encoded,
    seconds: 23.7,
};
/// The same with sums.
static QUANTIZED_SUMS: Source = Source {
    name: "quantized_sums.cu",
    text: include_str!("cuda/src/quantized_sums.cu"),
    stems: || stems(Family::Sum, true),
    forms: &["quantized_many", "quantized_wide"],
    shared: 0,
    when: When::Encoded,
    seconds: 4.4,
};
/// Gram matrices of panels.
static GRAM: Source = Source {
    name: "gram.cu",
    text: include_str!("cuda/src/gram.cu"),
    stems: || vec!["gram_product"],
    forms: &[""],
    shared: panel::GRAM_SHARED,
    when: When::Always,
    seconds: 0.5,
};
/// Cholesky factors of Gram matrices, and panels divided by them.
static CHOLESKY: Source = Source {
    name: "cholesky.cu",
    text: include_str!("cuda/src/cholesky.cu"),
    stems: || vec!["cholesky_factor", "cholesky_diagonal", "cholesky_below", "cholesky_solve"],
    forms: &[""],
    shared: panel::CHOLESKY_SHARED,
    when: When::Always,
    seconds: 2.2,
};
/// Copies of many rectangles, for small tables and for large ones.
static COPIES: Source = Source {
    name: "copies.cu",
    text: include_str!("cuda/src/copies.cu"),
    stems: || vec!["copy"],
    forms: &["few", "many"],
    shared: 0,
    when: When::Always,
    seconds: 0.4,
};
/// The sum of what ranks contribute.
static MESSAGES: Source = Source {
    name: "messages.cu",
    text: include_str!("cuda/src/messages.cu"),
    stems: || vec!["sum"],
    forms: &["messages"],
    shared: 0,
    when: When::Always,
    seconds: 0.3,
};
/// Slices chosen by their sums.
static SELECT: Source = Source {
    name: "select.cu",
    text: include_str!("cuda/src/select.cu"),
    stems: || vec!["slice"],
    forms: &["rows", "columns", "chunks", "choice", "take", "apply"],
    shared: 0,
    when: When::Always,
    seconds: 1.9,
};
/// Elementwise passes with sums.
static SUMS: Source = Source {
    name: "sums.cu",
    text: include_str!("cuda/src/sums.cu"),
    stems: || stems(Family::Sum, false),
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
    seconds: 3.6,
};
/// Sums of what other kernels left.
static TOTALS: Source = Source {
    name: "totals.cu",
    text: include_str!("cuda/src/totals.cu"),
    stems: || {
        vec![
            "add_pieces",
            "add_numbers",
            "add_strips_few",
            "add_strips_many",
            "add_tiles_few",
            "add_tiles_many",
        ]
    },
    forms: &[""],
    shared: 0,
    when: When::Always,
    seconds: 0.3,
};
/// Factors of jobs.
static FACTORS: Source = Source {
    name: "factors.cu",
    text: include_str!("cuda/src/factors.cu"),
    stems: || vec!["lamb_factors", "update_factors"],
    forms: &[""],
    shared: 0,
    when: When::Always,
    seconds: 0.2,
};
/// Passes over stacks of matrices.
static ROWS: Source = Source {
    name: "rows.cu",
    text: include_str!("cuda/src/rows.cu"),
    stems: || stems(Family::Row, false),
    forms: &["few", "many", "wide"],
    shared: 0,
    when: When::Always,
    seconds: 12.6,
};
/// Running means, in float64.
static MEANS: Source = Source {
    name: "means.cu",
    text: include_str!("cuda/src/means.cu"),
    stems: || stems(Family::Mean, false),
    forms: &["few", "many"],
    shared: 0,
    when: When::Always,
    seconds: 0.8,
};
/// Random projections of low-rank moments.
static NORMALS: Source = Source {
    name: "normals.cu",
    text: include_str!("cuda/src/normals.cu"),
    stems: || vec!["fill_normals"],
    forms: &[""],
    shared: 0,
    when: When::Always,
    seconds: 0.1,
};
/// Sources of all that is launched.
static SOURCES: &[&Source] = &[
    &UPDATES,
    &SYMMETRIC_MMA,
    &SYMMETRIC_WGMMA,
    &QUANTIZED,
    &QUANTIZED_SUMS,
    &GRAM,
    &CHOLESKY,
    &COPIES,
    &MESSAGES,
    &SELECT,
    &SUMS,
    &TOTALS,
    &FACTORS,
    &ROWS,
    &MEANS,
    &NORMALS,
];

/// All sources, with all headers.
pub(super) fn sources() -> &'static Sources {
    static ALL: OnceLock<Sources> = OnceLock::new();
    ALL.get_or_init(|| {
        let files = HEADERS.iter().map(|(name, text)| (*name, Cow::Borrowed(*text)));
        let written = generated().iter().map(|(name, text)| (*name, Cow::Borrowed(text.as_str())));
        let mut headers: Vec<_> = files.chain(written).collect();
        headers.sort_unstable_by_key(|(name, _)| *name);
        Sources::new(SOURCES, headers)
    })
}

/// Has the kernels of this thread launched on a stream of a device; `encoded` says whether also those for what is more than
/// numbers of its type.
///
/// # Errors
/// [`crate::error::Error::Cuda`] where there is no driver or no such device, and where a kernel cannot be loaded.
pub(super) fn enter(ordinal: usize, stream: usize, encoded: bool) -> Result<Entered> {
    let wanted = SOURCES.iter().filter(|source| encoded || source.when != When::Encoded);
    enter_with(ordinal, stream, &wanted.map(|source| source.name).collect::<Vec<_>>(), false)
}

/// As [`enter`], with the kernels of the named sources. One that is off is an error unless `allow_off`.
///
/// # Errors
/// As [`enter`]; where `allow_off`, not for a kernel that cannot be loaded.
pub fn enter_with(ordinal: usize, stream: usize, wanted: &[&str], allow_off: bool) -> Result<Entered> {
    cuda::enter(sources(), (ordinal, stream), wanted, allow_off)
}

/// Turns a source off for the process, on every device, and says so.
///
/// # Errors
/// [`crate::error::Error::Value`] for the name of none.
pub fn turn_off(name: &str, reason: &str) -> Result<()> {
    let source = sources().named(name);
    cuda::turn_off(source.ok_or_else(|| Error::Value(format!("there is no source {name:?}")))?, reason);
    Ok(())
}

/// Turns a source off on one device.
///
/// # Errors
/// [`Error::Value`] for the name of none, [`Error::Cuda`] where there is no driver or no such device.
pub fn turn_off_on(ordinal: usize, name: &str, reason: &str) -> Result<()> {
    let source = sources().named(name);
    let source = source.ok_or_else(|| Error::Value(format!("there is no source {name:?}")))?;
    cuda::turn_off_on(ordinal, source, reason)
}

/// States of all sources on a device.
///
/// # Errors
/// [`crate::error::Error::Cuda`] where there is no driver or no such device.
pub fn states(ordinal: usize) -> Result<Vec<(&'static str, State)>> {
    cuda::states(sources(), ordinal)
}

/// Name of the source that a kernel is from, by the kernel's whole name.
#[must_use]
pub fn source_of(kernel: &str) -> Option<&'static str> {
    sources().of_kernel(kernel)
}
