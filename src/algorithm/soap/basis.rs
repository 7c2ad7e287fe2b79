//! The eigenbases of a parameter's matrices: which sides have one, their states, and what they cost.

use super::super::flops;
use super::super::warned::Warned;
use super::layout::{SINCE, length, state_of};
use crate::algorithm::stage::UnitIo;
use crate::error::{Error, Result};
use crate::program::Program;
use crate::spec::{
    Block, DimSharding, Init, Matrices, Options, ParamSpec, Share, Side, StateSpec, UnitShape,
};
use crate::tensor::Lent;

/// Rule for the sides that have a basis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sides {
    Both,
    /// The shorter one; columns of a square matrix.
    Short,
    /// The side that is not sharded, where one is.
    Unsharded,
}

/// Settings and memory of the bases.
#[derive(Debug)]
pub(in crate::algorithm) struct Bases {
    view: Matrices,
    /// True if dimensions are multiplied together while the product is within `longest`.
    merges: bool,
    sides: Sides,
    /// The longest side that has a basis.
    longest: usize,
    pub(in crate::algorithm) frequency: usize,
    /// True if more than the bases needs whole matrices: what is turned by them is gathered wherever it is sharded.
    gathers: bool,
    /// True if states are owner-sharded (ZeRO-1) also where no rotated side is sharded.
    owned: bool,
    pub(super) seed: u64,
    pub(super) warned: Warned,
}

impl Bases {
    pub(in crate::algorithm) fn new(options: &Options, gathers: bool) -> Result<Self> {
        let sides = match options.word("sides")? {
            "both" => Sides::Both,
            "short" => Sides::Short,
            "unsharded" => Sides::Unsharded,
            other => {
                return Err(Error::Value(format!(
                    "sides must be one of both, short, unsharded, got '{other}'"
                )));
            }
        };
        let (view, merges) =
            (Matrices::from_options(options)?, options.has("merge_dims") && options.flag("merge_dims")?);
        if merges && (view.flatten || view.splits().is_some()) {
            return Err(Error::Value(
                "merge_dims excludes flatten, num_heads and split_sizes: give one of them".into(),
            ));
        }
        Ok(Self {
            view,
            merges,
            owned: options.flag("owned_states")?,
            sides,
            longest: options.count("max_precondition_dim")?,
            frequency: options.count("precondition_frequency")?.max(1),
            gathers,
            seed: options.count("seed")? as u64,
            warned: Warned::new(
                "oxidion.soap",
                "the gradient is not finite, or its factors do not decompose; its old bases are kept",
            ),
        })
    }

    /// The first of the dimensions of each side that these of a parameter are merged to, from the left.
    fn merged(&self, shape: &[usize]) -> Vec<usize> {
        let (mut starts, mut size) = (Vec::new(), 0_usize);
        for (dim, &own) in shape.iter().enumerate() {
            let product = size.saturating_mul(own);
            if dim > 0 && product <= self.longest {
                size = product;
            } else {
                size = own;
                starts.push(dim);
            }
        }
        starts
    }

    /// Tests whether dimensions of a parameter are merged.
    fn merges(&self, p: &ParamSpec) -> bool {
        self.merges && p.shape.len() > 1
    }

    /// The rule by which a parameter is read as matrices: one, where dimensions are merged.
    pub(in crate::algorithm) fn view(&self, p: &ParamSpec) -> Matrices {
        Matrices { flatten: self.view.flatten || self.merges(p), ..self.view.clone() }
    }

    /// The first dimension that holds columns.
    pub(in crate::algorithm) fn columns_of(&self, p: &ParamSpec) -> usize {
        if self.merges(p) {
            return self.merged(&p.shape).get(1).copied().unwrap_or(p.shape.len());
        }
        self.view.columns(p)
    }

    /// The matrices of a parameter of two or more dimensions; one of one column, where all are merged.
    ///
    /// # Errors
    /// `Error::Value` that names the parameter when the rule does not fit its shape.
    pub(in crate::algorithm) fn blocks(&self, p: &ParamSpec) -> Result<Vec<Block>> {
        if !self.merges(p) {
            return self.view.blocks(p);
        }
        let found = self.merged(&p.shape).len();
        if found > 2 {
            return Err(Error::Value(format!(
                "{}: merge_dims makes {found} dimensions of shape {:?} with max_precondition_dim={}, and two are the most: \
                 pass flatten=True instead of it, or another limit",
                p.name, p.shape, self.longest
            )));
        }
        let (rows, cols) = p.shape.split_at(self.columns_of(p));
        Ok(vec![Block { rows: rows.iter().product(), cols: cols.iter().product(), ..Block::default() }])
    }

    /// Phrase for `explain()`.
    pub(in crate::algorithm) fn phrase(&self, p: &ParamSpec) -> String {
        if !self.merges(p) {
            return self.view.phrase(p);
        }
        let (rows, cols) = p.shape.split_at(self.columns_of(p));
        let (rows, cols): (usize, usize) = (rows.iter().product(), cols.iter().product());
        if self.columns_of(p) < p.shape.len() {
            format!("merged to {rows} x {cols}")
        } else {
            format!("merged to {rows}")
        }
    }

    pub(in crate::algorithm) fn orientation(&self, num_shards: [usize; 2]) -> Option<bool> {
        let sharding = num_shards.map(|n| n > 1);
        // Transposed: the rows have the basis.
        (self.sides == Sides::Unsharded && sharding[0] != sharding[1]).then_some(sharding[1])
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a step count
    pub(in crate::algorithm) fn due(&self, steps: f64) -> bool {
        (steps as u64).is_multiple_of(self.frequency as u64)
    }

    /// The sides with a basis, rows first, of a parameter whose longest rows and columns these are.
    fn sides(&self, [rows, cols]: [usize; 2], transposed: bool) -> &'static [Side] {
        let fits = [rows <= self.longest, cols <= self.longest];
        if self.merges && cols == 1 {
            // One dimension: a full-matrix factor.
            return if fits[0] { &[Side::Rows] } else { &[] };
        }
        let wanted = match self.sides {
            Sides::Both => [true, true],
            Sides::Short => [rows < cols, rows >= cols],
            Sides::Unsharded => [transposed, !transposed],
        };
        match [wanted[0] && fits[0], wanted[1] && fits[1]] {
            [true, true] => &[Side::Rows, Side::Cols],
            [true, false] => &[Side::Rows],
            [false, true] => &[Side::Cols],
            [false, false] => &[],
        }
    }

    /// The sides with a basis of a parameter's matrices.
    pub(in crate::algorithm) fn sides_of(&self, p: &ParamSpec, blocks: &[Block]) -> &'static [Side] {
        if p.shape.len() < 2 {
            return &[];
        }
        let longest = blocks.iter().fold([0, 0], |[m, n], b| [m.max(b.rows), n.max(b.cols)]);
        self.sides(longest, p.oriented(blocks.iter().copied()))
    }

    /// The sides with a basis of the matrices of a class.
    pub(in crate::algorithm) fn sides_in(&self, class: &UnitShape) -> &'static [Side] {
        if class.inner.len() < 2 { &[] } else { self.sides(class.largest, class.transposed) }
    }

    /// Tests whether what the bases turn lies whole with those who store parameters.
    fn is_whole(&self, class: &UnitShape) -> bool {
        let is_whole = |side: &Side| class.num_shards[side.index()] == 1;
        let turned = if self.gathers { &[Side::Rows, Side::Cols] } else { self.sides_in(class) };
        turned.iter().all(is_whole)
    }

    /// Tests whether the states of these matrices are owner-sharded: where a rotated side is sharded, and on request where
    /// there are replicas or the bases are larger than a shard of the gradient. Elsewhere each process works with the
    /// states of what it stores.
    pub(in crate::algorithm) fn is_owned(&self, class: &UnitShape) -> bool {
        let sides = self.sides_in(class);
        if sides.is_empty() {
            return false;
        }
        if !self.is_whole(class) {
            return true;
        }
        let [rows, cols] = class.largest;
        let shards: usize = class.num_shards.iter().product();
        let squares: usize = sides.iter().map(|side| class.largest[side.index()].pow(2)).sum();
        self.owned && if shards == 1 { class.copies } else { rows * cols < shards * squares }
    }

    /// Tests whether bases and factors are recomputed in the states themselves.
    pub(super) fn has_states(&self, class: &UnitShape) -> bool {
        class.alone || self.is_owned(class)
    }

    /// Returns an empty program that declares where states are stored. The first two and those of the bases are
    /// owner-sharded. Elsewhere the factors of a side that is whole on all ranks are sums over the other side.
    pub(super) fn states_of(&self, class: &UnitShape) -> Program {
        let (sides, mut program) = (self.sides_in(class), Program::new());
        if self.is_owned(class) {
            program.owned = [0, 1].into_iter().chain(SINCE..SINCE + Self::count(sides.len())).collect();
            program.by_owners = true;
        } else {
            let over = sides.iter().map(|&side| side.other()).enumerate();
            let cut = over.filter(|(_, side)| class.num_shards[side.index()] > 1);
            program.contributed = cut.map(|(at, side)| (state_of(at, false), side)).collect();
        }
        program
    }

    /// Sharding of the columns of a basis in checkpoints, which belong to nothing of the parameter: where both sides have one,
    /// even over the processes that shard `other`.
    fn columns<T>(&self, sides: &[Side], other: T) -> DimSharding<T> {
        if sides.len() == 2 && self.view.alike() { DimSharding::Even(other) } else { DimSharding::Replicated }
    }

    /// The basis of a side of a unit, of its position among the sides that have one.
    pub(super) fn basis<'s>(unit: &'s UnitIo<'_>, at: usize, side: Side) -> Result<Lent<'s>> {
        unit.state[state_of(at, true)].view().first_cols(length(unit, side)).tensor()
    }

    /// States of the bases: since when they are there, and for each side the factor and the basis.
    pub(in crate::algorithm) fn states(&self, p: &ParamSpec, blocks: &[Block]) -> Vec<StateSpec> {
        let sides = self.sides_of(p, blocks);
        if sides.is_empty() {
            return Vec::new();
        }
        let (view, columns) = (self.view(p), self.columns_of(p));
        let lead = view.leading(p);
        let (split, per_matrix) = (view.splits(), view.per_matrix(p, blocks.len()));
        let numbers =
            || (p.shape[..lead].to_vec(), (0..lead).map(DimSharding::LikeParam).collect::<Vec<_>>());
        let state = |role, (shape, sharding), share| StateSpec {
            role,
            shape,
            sharding,
            share,
            dtype: p.dtype.arithmetic(),
            init: Init::Zeros,
            moment: None,
            quantized: None,
            on_host: false,
        };
        let mut states = vec![view.number("basis_step", p, blocks)];
        for &side in sides {
            let (dims, other, names) = match side {
                Side::Rows => (lead..columns, columns, ["L", "Q_L"]),
                Side::Cols => (columns..p.shape.len(), lead, ["R", "Q_R"]),
            };
            let length = blocks.iter().map(|b| [b.rows, b.cols][side.index()]).max().unwrap_or(0);
            // Blocks along this side share the rows of one matrix, others have each their own.
            let is_split = split.is_some_and(|split| split != side);
            let (mut shape, mut sharding) = numbers();
            if is_split {
                shape.push(per_matrix);
                sharding.push(DimSharding::Replicated);
            }
            shape.extend(dims.clone().map(|dim| p.shape[dim]));
            sharding.extend(dims.map(DimSharding::LikeParam));
            let rows = Share::Side { side, leading: lead, column: false };
            let of_each = if is_split { Share::Block } else { rows };
            shape.push(length);
            sharding.push(self.columns(sides, other));
            states.extend(names.map(|role| state(role, (shape.clone(), sharding.clone()), of_each)));
        }
        states
    }

    /// Number of these states for matrices in which `sides` sides have a basis.
    pub(super) fn count(sides: usize) -> usize {
        if sides == 0 { 0 } else { 1 + 2 * sides }
    }

    /// Operations of the products of a step, and of a refresh.
    pub(in crate::algorithm) fn flops(blocks: &[Block], sides: &[Side]) -> (f64, f64) {
        let one = |b: &Block, side: &Side| {
            let (d, n) = (flops([b.rows, b.cols][side.index()]), flops(b.numel()));
            // Three rotations and a statistic (half of it would do); a product and a QR with its factor.
            (8.0 * n * d, 4.7 * d * d * d)
        };
        let all = blocks.iter().flat_map(|b| sides.iter().map(move |side| one(b, side)));
        all.fold((0.0, 0.0), |(step, refresh), (a, b)| (step + a, refresh + b))
    }
}
