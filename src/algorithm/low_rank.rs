//! Common parts of the optimizers with moments of a projected gradient: which sides are projected, the states, when the
//! projection changes, the update.

use tch::Tensor;

use super::stage::{BufferIo, UnitIo, jobs};
use crate::error::{Error, Result};
use crate::kernels::{self, Job};
use crate::spec::{
    Block, Code, DimSharding, Init, Options, ParamSpec, Share, Side, StateSpec, StateStorage, UnitShape,
};
use crate::tensor::{DType, Lent};

/// Option keys of these optimizers.
pub(super) const OPTIONS: [&str; 8] = [
    "rank",
    "owned_states",
    "proj_type",
    "update_proj_gap",
    "decay_order",
    "seed",
    "momentum_dtype",
    "variance_dtype",
];

/// The states that all of them have, in this order.
pub(super) const MOMENTUM: usize = 0;
pub(super) const VARIANCE: usize = 1;
/// Moments that are owner-sharded (ZeRO-1) on request (`LowRank::is_owned`).
pub(super) const OWNED: [usize; 2] = [MOMENTUM, VARIANCE];

/// Sides of a matrix that are projected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Projection {
    /// The shorter one; columns of a square matrix.
    Std,
    /// The longer one; rows of a square matrix.
    Reverse,
    /// Rows.
    Left,
    /// Columns.
    Right,
    /// Both sides.
    Full,
    /// The side that is not sharded, where one is.
    Unsharded,
}

#[derive(Debug)]
pub(super) struct LowRank {
    rank: Option<usize>,
    projection: Projection,
    pub(super) gap: usize,
    pub(super) seed: u64,
    /// True if weight decay comes after the update.
    pub(super) late: bool,
    pub(super) cautious: bool,
    momentum_dtype: Option<DType>,
    variance_dtype: Option<DType>,
    storage: StateStorage,
    /// True if moments that would be replicated on several processes are owner-sharded (ZeRO-1) instead.
    owned: bool,
}

impl LowRank {
    pub(super) fn new(options: &Options) -> Result<Self> {
        let projection = match options.word("proj_type")? {
            "std" => Projection::Std,
            "reverse_std" => Projection::Reverse,
            "left" => Projection::Left,
            "right" => Projection::Right,
            "full" => Projection::Full,
            "unsharded" => Projection::Unsharded,
            other => {
                return Err(Error::Value(format!(
                    "proj_type must be one of std, reverse_std, left, right, full, unsharded, got '{other}'"
                )));
            }
        };
        Ok(Self {
            rank: options.optional_count("rank")?,
            projection,
            gap: options.count("update_proj_gap")?.max(1),
            seed: options.count("seed")? as u64,
            late: options.either("decay_order", "torch", "galore")?,
            cautious: options.cautious()?,
            momentum_dtype: options.dtype("momentum_dtype")?,
            variance_dtype: options.dtype("variance_dtype")?,
            storage: StateStorage::from_options(options)?,
            owned: options.flag("owned_states")?,
        })
    }

    /// Tests whether the moments of these matrices are owner-sharded. They are where they would be replicated otherwise,
    /// as a projected side is sharded or there are replicas of the parameters.
    pub(super) fn is_owned(&self, class: &UnitShape, sides: &[Side]) -> bool {
        let is_cut = sides.iter().any(|side| class.num_shards[side.index()] > 1);
        self.owned && !class.alone && (is_cut || class.copies)
    }

    /// The rank of the projected gradient; 0 where nothing is projected.
    pub(super) fn rank(&self) -> usize {
        self.rank.unwrap_or(0)
    }

    /// Tests whether the gradient of a parameter is projected: it has matrices whose sides are longer than the rank.
    pub(super) fn takes(&self, p: &ParamSpec) -> bool {
        p.shape.len() >= 2
            && self.rank.is_some_and(|r| r > 0 && p.shape[p.shape.len() - 2..].iter().all(|&n| r < n))
    }

    pub(super) fn orientation(&self, num_shards: [usize; 2]) -> Option<bool> {
        let sharding = num_shards.map(|n| n > 1);
        // Transposed: the rows are projected.
        (self.projection == Projection::Unsharded && sharding[0] != sharding[1]).then_some(sharding[1])
    }

    /// The sides that are projected, rows first.
    pub(super) fn sides(&self, rows: usize, cols: usize, transposed: bool) -> &'static [Side] {
        let left = match self.projection {
            Projection::Full => return &[Side::Rows, Side::Cols],
            Projection::Std => rows < cols,
            Projection::Reverse => rows >= cols,
            Projection::Left => true,
            Projection::Right => false,
            Projection::Unsharded => transposed,
        };
        if left { &[Side::Rows] } else { &[Side::Cols] }
    }

    /// The sides that are projected of a parameter's matrices.
    pub(super) fn sides_of(&self, p: &ParamSpec, blocks: &[Block]) -> &'static [Side] {
        let [rows, cols] = blocks.first().map_or([0, 0], |b| [b.rows, b.cols]);
        self.sides(rows, cols, p.oriented(blocks.iter().copied()))
    }

    /// States of a parameter: both moments and the counter.
    pub(super) fn states(&self, p: &ParamSpec, sides: &[Side]) -> Vec<StateSpec> {
        let (lead, wide) = (p.shape.len() - 2, p.dtype.arithmetic());
        let side = |side: Side| {
            if sides.contains(&side) {
                (self.rank(), DimSharding::Replicated)
            } else {
                (p.shape[lead + side.index()], DimSharding::LikeParam(lead + side.index()))
            }
        };
        let (rows, cols) = (side(Side::Rows), side(Side::Cols));
        let share = match sides {
            [Side::Cols] => Share::Side { side: Side::Rows, leading: lead, column: false },
            [Side::Rows] => Share::Each { cols: Some(Side::Cols) },
            _ => Share::Each { cols: None },
        };
        let moment = |role, dtype: Option<DType>, code| {
            let spec = StateSpec {
                role,
                shape: p.shape[..lead].iter().copied().chain([rows.0, cols.0]).collect(),
                dtype: dtype.or(self.storage.dtype()).unwrap_or(wide),
                init: Init::Zeros,
                sharding: (0..lead).map(DimSharding::LikeParam).chain([rows.1, cols.1]).collect(),
                share,
                moment: Some(code),
                quantized: None,
                on_host: false,
            };
            spec.eight_bit(code, &self.storage)
        };
        vec![
            moment("momentum", self.momentum_dtype, Code::Signed),
            moment("variance", self.variance_dtype, Code::Unsigned),
            StateSpec::counter("step"),
        ]
    }

    /// The last step where the update is spelled out: `X ← X - rate·U` and decay.
    pub(super) fn update(&self, rate: f64, decay: f64, jobs: &mut [Job<'_, 1, 1>]) -> Result<()> {
        kernels::run(&kernels::Apply { rate, decay, cautious: self.cautious, late: self.late }, jobs)
    }
}

/// The gradient as products find it: itself, or where all of a bucket's are converted (parameters in a narrow type) its
/// copy in the scratch `wide`. [`in_products`] has the last word.
pub(super) fn gradient<'s>(
    class: &UnitShape,
    unit: &'s UnitIo<'_>,
    wide: &'s mut BufferIo<'_>,
) -> Result<Lent<'s>> {
    let product = class.param.arithmetic();
    if class.param == product || unit.grad.dtype() == product {
        return unit.grad.tensor();
    }
    let [rows, cols] = unit.grad.shape();
    let mut wide = wide.flat(unit)?.into_matrix(0, [rows, cols], cols);
    let mut jobs = jobs([([unit.grad], [wide.reborrow()])]);
    kernels::run(&kernels::Convert { factor: 1.0 }, &mut jobs)?;
    wide.into_view().tensor()
}

/// The gradient in the type of products. It differs from the parameter's type where the user has set `grad_dtype`. The plan
/// does not know this, so no scratch is reserved for the copy.
pub(super) fn in_products(class: &UnitShape, grad: &Tensor) -> Result<Tensor> {
    Ok(grad.f_to_kind(class.param.arithmetic().kind())?)
}
