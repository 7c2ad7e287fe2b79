//! Headers for devices that are written from the declarations of operations: of each pass its kernels and their
//! operations.

use std::fmt::Write as _;
use std::sync::OnceLock;

use super::op::{Family, Kernel};
use super::ops::table;
use super::print::structure;

/// The pass of each kind of kernel, as macros name it, its header, and what that includes.
const FAMILIES: [(Family, &str, &str, &str); 4] = [
    (Family::Elementwise, "ELEMENTWISE", "each_elementwise.cuh", "arithmetic.cuh"),
    (Family::Sum, "SUM", "each_sum.cuh", "summed.cuh"),
    (Family::Mean, "MEAN", "each_mean.cuh", "arithmetic.cuh"),
    (Family::Row, "ROW", "each_row.cuh", "stacks.cuh"),
];

/// All kernels that are declared, in order.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    table()
}

/// Names of the kernels of a pass; where `encoded`, of those with a form for operands that are more than numbers of their
/// type.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) fn stems(family: Family, encoded: bool) -> Vec<&'static str> {
    kernels().filter(|k| k.family == family && (!encoded || k.has_encoded_form())).map(|k| k.name).collect()
}

/// Headers by name that are written here.
pub fn generated() -> &'static [(&'static str, String)] {
    static ALL: OnceLock<Vec<(&str, String)>> = OnceLock::new();
    ALL.get_or_init(|| FAMILIES.map(|(family, name, header, base)| (header, each(family, name, base))).into())
}

/// The operations of a pass, and macros that name each of its kernels.
fn each(family: Family, name: &str, base: &str) -> String {
    let mut text = format!(
        "// Written from the formulas in src/kernels/ops.\n#pragma once\n#include \"arithmetic.cuh\"\n#include \"{base}\"\n"
    );
    for kernel in kernels().filter(|kernel| kernel.family == family) {
        text.push_str(&structure(kernel, (kernel.tape)()));
    }
    for (prefix, encoded) in [("", false), ("ENCODED_", true)] {
        let _ = write!(text, "\n#define EACH_{prefix}{name}(KERNEL)");
        for kernel in kernels().filter(|k| k.family == family && (!encoded || k.has_encoded_form())) {
            let _ = write!(text, " \\\n    KERNEL({}, {})", kernel.name, kernel.device);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_of_kernels_are_used_once() {
        let names: BTreeSet<_> = kernels().map(|kernel| kernel.name).collect();
        let devices: BTreeSet<_> = kernels().map(|kernel| kernel.device).collect();
        assert!(names.len() > 20);
        assert_eq!([names.len(), devices.len()], [kernels().count(); 2]);
    }

    #[test]
    fn every_kernel_stands_in_the_header_of_its_pass() {
        let all: Vec<_> = FAMILIES.map(|(family, name, _, base)| each(family, name, base)).into();
        for kernel in kernels() {
            let start = format!("struct {} {{", kernel.device);
            assert_eq!(all.iter().map(|text| text.matches(&start).count()).sum::<usize>(), 1, "{start}");
        }
        assert!(all[0].contains("    KERNEL(adamw_largest, AdamWLargest) \\\n"));
        assert!(!stems(Family::Elementwise, true).contains(&"count"));
    }
}
