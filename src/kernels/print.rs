//! Prints recorded formulas as CUDA.

use std::fmt::Write as _;

use super::formula::tape::{Binary, Node, Tape, Unary};
use super::op::{Family, Kernel, Operand};

/// A tape that is being printed.
struct Printed<'t> {
    tape: &'t Tape,
    /// Numbers that the kernel needs.
    is_needed: Vec<bool>,
    /// Numbers of an element, in the type of the arithmetic; the others are float64 and of a job.
    is_of_element: Vec<bool>,
    is_flag: Vec<bool>,
}

impl<'t> Printed<'t> {
    fn new(kernel: &Kernel, tape: &'t Tape) -> Self {
        let count = tape.nodes.len();
        let mut is_needed = vec![false; count];
        for at in
            written(kernel, tape).map(|(_, at)| at).chain(tape.summed.iter().flatten().flatten().copied())
        {
            is_needed[at] = true;
        }
        for at in (0..count).rev() {
            if is_needed[at] {
                tape.nodes[at].parts().for_each(|part| is_needed[part] = true);
            }
        }
        let (mut is_of_element, mut is_flag) = (Vec::with_capacity(count), Vec::with_capacity(count));
        for node in &tape.nodes {
            is_of_element.push(match node {
                Node::Operand(_) | Node::RowScale(_) | Node::ColScale(_) | Node::Narrow(_) => true,
                node => node.parts().any(|part: usize| is_of_element[part]),
            });
            is_flag.push(matches!(
                node,
                Node::Flag(_)
                    | Node::Never
                    | Node::Counts
                    | Node::Binary(Binary::Less | Binary::AtLeast | Binary::Both, ..)
            ));
        }
        Self { tape, is_needed, is_of_element, is_flag }
    }

    /// The name of a number where an element's numbers are computed, or a job's.
    fn name(&self, at: usize, for_element: bool) -> String {
        match self.tape.nodes[at] {
            Node::Const(x) if for_element => format!("C({x:?})"),
            Node::Const(x) => format!("{x:?}"),
            Node::Operand(n) => format!("x{n}"),
            Node::Narrow(_) => format!("k{at}"),
            _ if for_element && !self.is_of_element[at] => format!("k{at}"),
            _ => format!("t{at}"),
        }
    }

    /// The expression of a number.
    fn expression(&self, at: usize) -> String {
        let own = |part: usize| self.name(part, self.is_of_element[at]);
        match self.tape.nodes[at] {
            Node::Const(x) => format!("{x:?}"),
            Node::Scalar(n) => format!("s[{n}]"),
            Node::Flag(n) => format!("s[{n}] != 0"),
            Node::Factor(n) => format!("job.factor[{n}]"),
            Node::Live(n) => format!("in_global_memory(job.live)[{n}]"),
            Node::Never => "false".into(),
            Node::Counts => "job.steps != nullptr".into(),
            Node::Steps => "job.steps ? static_cast<double>(*in_global_memory(job.steps)) : 0.0".into(),
            Node::Rate => "s.rate.value()".into(),
            Node::Operand(n) => format!("x[{n}]"),
            Node::RowScale(n) => format!("row[{n}]"),
            Node::ColScale(n) => format!("col[{n}]"),
            Node::Narrow(a) => format!("static_cast<C>({})", self.name(a, false)),
            Node::Unary(what, a) => match what {
                Unary::Neg => format!("-{}", own(a)),
                Unary::Sqrt => format!("root({})", own(a)),
                Unary::Exp => format!("exp({})", own(a)),
                Unary::Ln => format!("log({})", own(a)),
            },
            Node::Binary(what, a, b) => match what {
                Binary::Add => format!("{} + {}", own(a), own(b)),
                Binary::Sub => format!("{} - {}", own(a), own(b)),
                Binary::Mul => format!("{} * {}", own(a), own(b)),
                Binary::Div => format!("quotient({}, {})", own(a), own(b)),
                Binary::Pow => format!("to_power({}, {})", own(a), self.exponent(at, b)),
                Binary::Power => format!("power({}, static_cast<float>({}))", own(a), own(b)),
                Binary::Less => format!("{} < {}", own(a), own(b)),
                Binary::AtLeast => format!("{} >= {}", own(a), own(b)),
                Binary::Both => format!("{} && {}", own(a), own(b)),
            },
            Node::Select(flag, yes, no) => format!("{} ? {} : {}", own(flag), own(yes), own(no)),
        }
    }

    /// An exponent, which is float64 whatever is taken to its power.
    fn exponent(&self, at: usize, exponent: usize) -> String {
        let is_literal = matches!(self.tape.nodes[exponent], Node::Const(_));
        self.name(exponent, self.is_of_element[at] && !is_literal)
    }

    /// The type of a number.
    fn kind(&self, at: usize) -> &'static str {
        match (self.is_flag[at], self.is_of_element[at]) {
            (true, _) => "bool",
            (false, true) => "C",
            (false, false) => "double",
        }
    }

    /// Numbers that are computed for each job and used for each element: constants, and float64 numbers as they are.
    fn members(&self) -> Vec<usize> {
        let is_used = |own: usize| {
            (0..self.tape.nodes.len()).any(|at| {
                self.is_needed[at]
                    && self.is_of_element[at]
                    && !matches!(self.tape.nodes[at], Node::Narrow(_))
                    && self.tape.nodes[at].parts().any(|part| part == own)
            })
        };
        let is_member = |at: &usize| match self.tape.nodes[*at] {
            Node::Const(_) => false,
            Node::Narrow(_) => true,
            _ => !self.is_of_element[*at] && is_used(*at),
        };
        (0..self.tape.nodes.len()).filter(|at| self.is_needed[*at]).filter(is_member).collect()
    }
}

/// Operands that a kernel writes, with their new elements.
fn written<'t>(kernel: &'t Kernel, tape: &'t Tape) -> impl Iterator<Item = (usize, usize)> + 't {
    kernel
        .operands
        .iter()
        .zip(&tape.updated)
        .enumerate()
        .filter(|(_, (operand, _))| operand.writes)
        .map(|(n, (_, at))| (n, *at))
}

/// The structure of a kernel's operation: constants of a job, and what is done with an element of each operand.
pub(super) fn structure(kernel: &Kernel, tape: &Tape) -> String {
    let printed = Printed::new(kernel, tape);
    let (name, count) = (kernel.device, kernel.operands.len());
    let names: Vec<_> = kernel.operands.iter().map(|operand| operand.name).collect();
    let bits = |has: fn(&Operand) -> bool| -> String {
        kernel.operands.iter().rev().map(|operand| if has(operand) { '1' } else { '0' }).collect()
    };
    let is_row = kernel.family == Family::Row;
    let mut text = format!(
        "\n// {}: {}\ntemplate <typename C>\nstruct {name} {{\n    static constexpr int OPERANDS = {count};\n    \
         static constexpr u32 READS = 0b{};\n    static constexpr u32 WRITES = 0b{};\n",
        kernel.name,
        names.join(", "),
        bits(|operand| operand.reads),
        bits(|operand| operand.writes),
    );
    if is_row {
        let scales = tape.nodes.iter().zip(&printed.is_needed).filter_map(|(node, needed)| match node {
            Node::RowScale(n) | Node::ColScale(n) if *needed => Some(n + 1),
            _ => None,
        });
        let _ = write!(
            text,
            "    static constexpr int SCALES = {};\n    static constexpr bool SUMS = {};\n    static constexpr bool TOTAL = {};\n    \
             double total = 0;\n",
            scales.max().unwrap_or(0),
            tape.summed[0].is_some(),
            tape.summed[1].is_some(),
        );
    } else if !tape.summed.is_empty() {
        let _ = write!(
            text,
            "    static constexpr int SUMS = {};\n    double sum[SUMS] = {{}};\n",
            tape.summed.len()
        );
    }
    let members = printed.members();
    if kernel.sums_stored {
        text.push_str("    Type stored;\n");
    }
    for at in &members {
        let _ = writeln!(text, "    {} k{at};", printed.kind(*at));
    }
    constructor(&mut text, kernel, &printed, &members);
    body(&mut text, kernel, &printed);
    text.push_str("};\n");
    text
}

fn constructor(text: &mut String, kernel: &Kernel, printed: &Printed<'_>, members: &[usize]) {
    let job = if kernel.family == Family::Row { "StackJob" } else { "Job" };
    let _ = writeln!(text, "\n    __device__ {}(const Scalars& s, const {job}& job) {{", kernel.device);
    for (at, node) in printed.tape.nodes.iter().enumerate() {
        let is_plain = matches!(node, Node::Const(_));
        if printed.is_needed[at] && !printed.is_of_element[at] && !is_plain {
            let _ = writeln!(text, "        const {} t{at} = {};", printed.kind(at), printed.expression(at));
        }
    }
    for at in members {
        let value = if printed.is_of_element[*at] { printed.expression(*at) } else { format!("t{at}") };
        let _ = writeln!(text, "        k{at} = {value};");
    }
    if kernel.sums_stored {
        let _ = writeln!(text, "        stored = job.type[OPERANDS - 1];");
    }
    text.push_str("    }\n");
}

fn body(text: &mut String, kernel: &Kernel, printed: &Printed<'_>) {
    let tape = printed.tape;
    let is_row = kernel.family == Family::Row;
    let (returned, scales) = match (is_row, is_row && tape.summed[0].is_some()) {
        (false, _) => ("void", ""),
        (true, true) => ("double", ", const C* row, const C* col"),
        (true, false) => ("C", ", const C* row, const C* col"),
    };
    let is_const = if tape.summed.iter().any(Option::is_some) { "" } else { " const" };
    let _ = writeln!(
        text,
        "\n    __device__ {returned} operator()(C (&x)[{}]{scales}){is_const} {{",
        kernel.operands.len()
    );
    for (at, node) in tape.nodes.iter().enumerate() {
        if printed.is_needed[at] && printed.is_of_element[at] && !matches!(node, Node::Narrow(_)) {
            let (kind, name) = (printed.kind(at), printed.name(at, true));
            let _ = writeln!(text, "        const {kind} {name} = {};", printed.expression(at));
        }
    }
    for (n, at) in written(kernel, tape) {
        if !matches!(tape.nodes[at], Node::Operand(own) if own == n) {
            let _ = writeln!(text, "        x[{n}] = {};", printed.name(at, true));
        }
    }
    let term = |pair: [usize; 2]| {
        let wide = |at: usize| {
            let name = printed.name(at, true);
            if kernel.sums_stored {
                format!("as_stored(stored, {name})")
            } else {
                format!("static_cast<double>({name})")
            }
        };
        format!("{} * {}", wide(pair[0]), wide(pair[1]))
    };
    if is_row {
        if let Some(pair) = tape.summed[1] {
            let _ = writeln!(text, "        total += {};", term(pair));
        }
        let result = tape.summed[0].map_or_else(|| "C(0)".into(), term);
        let _ = writeln!(text, "        return {result};");
    } else {
        for (k, pair) in tape.summed.iter().flatten().enumerate() {
            let _ = writeln!(text, "        sum[{k}] += {};", term(*pair));
        }
    }
    text.push_str("    }\n");
}
