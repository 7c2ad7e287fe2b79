//! A formula as it is recorded: every number that it computes, once, in order.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use super::{Num, Own};

/// A number of a formula that is recorded: its place on the tape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expr(pub(in crate::kernels) usize);

/// Origin of a number of a tape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::kernels) enum Node {
    /// A constant.
    Const(f64),
    /// A scalar of the operation.
    Scalar(usize),
    /// A scalar of the operation that is yes or no.
    Flag(usize),
    /// A factor of the job that the host knows.
    Factor(usize),
    /// A factor of the job that an earlier pass left.
    Live(usize),
    /// A flag that holds nowhere.
    Never,
    /// True where a device counts the steps.
    Counts,
    /// The number of steps that a device has counted.
    Steps,
    /// The learning rate that a device reads.
    Rate,
    /// An element of an operand.
    Operand(usize),
    /// A scale of the element's row.
    RowScale(usize),
    /// A scale of the element's column.
    ColScale(usize),
    /// A constant, rounded to the type of the arithmetic.
    Narrow(usize),
    /// A function of one number.
    Unary(Unary, usize),
    /// A function of two.
    Binary(Binary, usize, usize),
    /// The second where the first holds, else the third.
    Select(usize, usize, usize),
}

/// Functions of one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum Unary {
    Neg,
    Sqrt,
    Exp,
    Ln,
}

/// Functions of two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernels) enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// Any power.
    Pow,
    /// A power to a number of steps.
    Power,
    Less,
    AtLeast,
    Both,
}

impl Node {
    /// The numbers that it is made of.
    pub(in crate::kernels) fn parts(self) -> impl Iterator<Item = usize> {
        let parts = match self {
            Self::Narrow(a) | Self::Unary(_, a) => [Some(a), None, None],
            Self::Binary(_, a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
            _ => [None; 3],
        };
        parts.into_iter().flatten()
    }

    /// Tests whether both are made alike.
    fn is_like(self, other: Self) -> bool {
        // Constants by their bits: 0 is not -0.
        match (self, other) {
            (Self::Const(a), Self::Const(b)) => a.to_bits() == b.to_bits(),
            (a, b) => a == b,
        }
    }
}

/// A recorded formula.
#[derive(Debug)]
pub(crate) struct Tape {
    /// All numbers, each behind those that it is made of.
    pub(in crate::kernels) nodes: Vec<Node>,
    /// The new element of each operand.
    pub(in crate::kernels) updated: Vec<usize>,
    /// Pairs of factors whose products are summed: of each sum one. `None` where a pass over rows has no such sum.
    pub(in crate::kernels) summed: Vec<Option<[usize; 2]>>,
}

thread_local! {
    static NODES: RefCell<Vec<Node>> = const { RefCell::new(Vec::new()) };
}

/// Records a number.
pub(in crate::kernels) fn push(node: Node) -> Expr {
    NODES.with_borrow_mut(|nodes| {
        Expr(nodes.iter().position(|known| known.is_like(node)).unwrap_or_else(|| {
            nodes.push(node);
            nodes.len() - 1
        }))
    })
}

impl Own<Expr> {
    /// Returns the numbers of a job as they are recorded.
    pub(in crate::kernels) fn recorded() -> Self {
        Self {
            factors: [0, 1].map(|at| push(Node::Factor(at))),
            live: [0, 1, 2, 3, 4].map(|at| push(Node::Live(at))),
            counts: push(Node::Counts),
            steps: push(Node::Steps),
            rate: push(Node::Rate),
        }
    }
}

impl Tape {
    /// Records what a function does with `N` operands, and what it returns: the factors of sums.
    pub(in crate::kernels) fn record<const N: usize>(
        formula: impl FnOnce(&mut [Expr; N]) -> Vec<Option<[Expr; 2]>>,
    ) -> Self {
        NODES.set(Vec::new());
        let mut x: [Expr; N] = std::array::from_fn(|at| push(Node::Operand(at)));
        let summed = formula(&mut x);
        let summed = summed.into_iter().map(|pair| pair.map(|pair| pair.map(|Expr(at)| at))).collect();
        Self { nodes: NODES.take(), updated: x.iter().map(|Expr(at)| *at).collect(), summed }
    }
}

fn unary(what: Unary, Expr(a): Expr) -> Expr {
    push(Node::Unary(what, a))
}

fn binary(what: Binary, Expr(a): Expr, Expr(b): Expr) -> Expr {
    push(Node::Binary(what, a, b))
}

macro_rules! operator {
    ($($name:ident::$function:ident),*) => {
        $(
            impl $name for Expr {
                type Output = Self;
                fn $function(self, other: Self) -> Self {
                    binary(Binary::$name, self, other)
                }
            }
        )*
    };
}
operator!(Add::add, Sub::sub, Mul::mul, Div::div);

impl Neg for Expr {
    type Output = Self;
    fn neg(self) -> Self {
        unary(Unary::Neg, self)
    }
}

impl Num for Expr {
    type Wide = Self;
    type Flag = Self;

    fn of(x: f64) -> Self {
        push(Node::Const(x))
    }
    fn narrow(Self(x): Self) -> Self {
        push(Node::Narrow(x))
    }
    fn sqrt(self) -> Self {
        unary(Unary::Sqrt, self)
    }
    fn exp(self) -> Self {
        unary(Unary::Exp, self)
    }
    fn ln(self) -> Self {
        unary(Unary::Ln, self)
    }
    fn powf(self, exponent: Self) -> Self {
        binary(Binary::Pow, self, exponent)
    }
    fn power(self, steps: Self) -> Self {
        binary(Binary::Power, self, steps)
    }
    fn lt(self, other: Self) -> Self {
        binary(Binary::Less, self, other)
    }
    fn ge(self, other: Self) -> Self {
        binary(Binary::AtLeast, self, other)
    }
    fn never() -> Self {
        push(Node::Never)
    }
    fn both(a: Self, b: Self) -> Self {
        binary(Binary::Both, a, b)
    }
    fn select(flag: Self, yes: Self, no: Self) -> Self {
        if flag == Self::never() { no } else { push(Node::Select(flag.0, yes.0, no.0)) }
    }
}
