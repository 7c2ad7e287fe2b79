//! Headers for devices that are written from the declarations of operations: their scalars by name, their operands, and
//! the kernels of each pass.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::OnceLock;

use super::cuda_call::{Declared, Family, Kernel};
use super::ops::table;

/// The pass of each kind of kernel, as macros name it, and its header.
const FAMILIES: [(Family, &str, &str); 4] = [
    (Family::Elementwise, "ELEMENTWISE", "each_elementwise.cuh"),
    (Family::Sum, "SUM", "each_sum.cuh"),
    (Family::Mean, "MEAN", "each_mean.cuh"),
    (Family::Row, "ROW", "each_row.cuh"),
];

/// All kernels that are declared, in order.
pub fn kernels() -> impl Iterator<Item = &'static Kernel> {
    table().flat_map(|declared| declared.kernels.iter().copied())
}

/// Names of the kernels of a pass; where `encoded`, of those with a form for operands that are more than numbers of their
/// type.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(super) fn stems(family: Family, encoded: bool) -> Vec<&'static str> {
    kernels().filter(|k| k.family == family && (!encoded || k.has_encoded_form())).map(|k| k.name).collect()
}

/// Headers by name that have no file of their own: those that are written here, and operations whose text stands in a Rust
/// file.
pub fn generated() -> &'static [(&'static str, String)] {
    static ALL: OnceLock<Vec<(&str, String)>> = OnceLock::new();
    ALL.get_or_init(|| {
        let inline = table().filter(|declared| declared.is_inline);
        inline
            .map(|declared| (declared.header.0, declared.header.1.to_owned()))
            .chain([("scalars.cuh", scalars())])
            .chain(FAMILIES.map(|(family, name, header)| (header, each(family, name))))
            .collect()
    })
}

/// Scalars of every structure and operands of every kernel.
fn scalars() -> String {
    let mut text = String::from(
        "// Written from the declarations in src/kernels/ops: scalars of operations by name, operands of kernels.\n\
         #pragma once\n#include \"jobs.cuh\"\n",
    );
    let mut done = BTreeSet::new();
    for kernel in kernels() {
        let told = kernel.told.trim_end_matches("Scalars");
        if done.insert(told) {
            let _ = write!(text, "\nstruct {told}Scalars {{\n    const Scalars& all;\n\n");
            let _ = writeln!(text, "    __device__ {told}Scalars(const Scalars& all) : all(all) {{}}");
            for (at, scalar) in kernel.scalars.iter().enumerate() {
                let (kind, is_set) = if scalar.is_flag { ("bool", " != 0") } else { ("double", "") };
                let _ = writeln!(
                    text,
                    "    __device__ {kind} {}() const {{ return all[{at}]{is_set}; }}",
                    scalar.name
                );
            }
            text.push_str("};\n");
        }
        let bits = |has: fn(&super::cuda_call::Operand) -> bool| {
            kernel
                .operands
                .iter()
                .rev()
                .map(|operand| if has(operand) { '1' } else { '0' })
                .collect::<String>()
        };
        let names: Vec<_> = kernel.operands.iter().map(|operand| operand.name).collect();
        let _ = write!(
            text,
            "\n// {}: {}\nstruct {}Operands {{\n    static constexpr int OPERANDS = {};\n    \
             static constexpr u32 READS = 0b{};\n    static constexpr u32 WRITES = 0b{};\n}};\n",
            kernel.name,
            names.join(", "),
            kernel.device,
            names.len(),
            bits(|operand| operand.reads),
            bits(|operand| operand.writes),
        );
    }
    text
}

/// The operations of a pass, and macros that name each of its kernels.
fn each(family: Family, name: &str) -> String {
    let mut text = String::from("// Written from the declarations in src/kernels/ops.\n#pragma once\n");
    let has = |declared: &&Declared| declared.kernels.iter().any(|kernel| kernel.family == family);
    for declared in table().filter(has) {
        let _ = writeln!(text, "#include \"{}\"", declared.header.0);
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
    use super::*;

    #[test]
    fn names_of_kernels_and_headers_are_used_once() {
        let names: BTreeSet<_> = kernels().map(|kernel| kernel.name).collect();
        let devices: BTreeSet<_> = kernels().map(|kernel| kernel.device).collect();
        let headers: BTreeSet<_> = table().map(|declared| declared.header.0).collect();
        assert!(names.len() > 20);
        assert_eq!([names.len(), devices.len()], [kernels().count(); 2]);
        assert_eq!(headers.len(), table().count());
    }

    #[test]
    fn scalars_are_read_by_name_in_the_order_of_the_declaration() {
        let text = scalars();
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what} is not in\n{text}"));
        let lion = &text[at("struct LionScalars {")..];
        let lion = &lion[..lion.find("};").unwrap_or(0)];
        assert!(lion.contains("double lr() const { return all[0]; }"), "{lion}");
        assert!(lion.contains("bool cautious() const { return all[4] != 0; }"), "{lion}");
        assert_eq!(text.matches("struct MomentumScalars {").count(), 1);
        at("// momentum: g, m, u\nstruct MomentumOperands {\n    static constexpr int OPERANDS = 3;\n    \
            static constexpr u32 READS = 0b011;\n    static constexpr u32 WRITES = 0b110;\n};\n");
        assert!(
            each(Family::Elementwise, "ELEMENTWISE").contains("    KERNEL(adamw_largest, AdamWLargest) \\\n")
        );
        assert!(!stems(Family::Elementwise, true).contains(&"count"));
    }
}
