//! Factors of jobs that follow from sums on the device.

use tch::Kind;

use crate::error::{Error, Result};
use crate::kernels::libtorch::value::Value::{self, Computed, Scalar};
use crate::kernels::libtorch::value::{copied, followed_rate};
use crate::kernels::libtorch::{load, write_numbers};
use crate::kernels::ops::factors::{Clipping, Debias, Rates, Steps, Trust, UpdateSums, count};
use crate::tensor::FlatView;

/// The first number of float64 memory, or of a counter.
fn first(x: &FlatView) -> Result<Value> {
    Ok(copied(&load(x, Kind::Double)?.f_select(0, 0)?).into())
}

/// Writes the four factors of each job of LAMB. See [`Trust::factors`].
pub(in crate::kernels) fn lamb_factors(
    trust: &Trust,
    steps: &Steps,
    norms: Option<&[FlatView]>,
    group: &[FlatView],
    out: &[FlatView],
) -> Result<()> {
    let mut clip = Scalar(1.0);
    if !group.is_empty() {
        let mut squares = Scalar(0.0);
        for sums in group {
            squares = squares + Computed(load(sums, Kind::Double)?).sum();
        }
        let (norm, most) = (squares.sqrt(), Scalar(trust.max_grad_norm));
        clip = most.below(&norm).choose(&(&most / &norm), &Scalar(1.0));
    }
    let unit = followed_rate()?;
    for (job, out) in out.iter().enumerate() {
        let own = match steps {
            Steps::Counted(steps) => trust.corrections(*of(steps, job)?).map(Scalar),
            Steps::Counters(counters) => {
                let step = first(of(counters, job)?)?;
                let [beta1, beta2] = trust.betas.map(|beta| 1.0 - step.power_of(beta));
                [1.0 / beta1, 1.0 / beta2.sqrt()]
            }
        };
        let rate = match norms {
            Some(norms) => rate_of(trust, &own, of(norms, job)?)? * &unit,
            None => Scalar(0.0),
        };
        let [one, two] = if trust.debias == Debias::Moments { own } else { [Scalar(1.0), Scalar(1.0)] };
        write_numbers(out, &[one, two, &clip * trust.grad_factor, rate])?;
    }
    Ok(())
}

/// The factor of u for a learning rate of `lr` units.
fn rate_of(trust: &Trust, [one, two]: &[Value; 2], squares: &FlatView) -> Result<Value> {
    let squares = load(squares, Kind::Double)?;
    let [mut x, u] = [0, 1].map(|at| Value::from(squares.f_select(0, at)).sqrt());
    let [low, high] = trust.bounds;
    if !low.is_nan() && !high.is_nan() {
        x = x.max(&Scalar(low)).min(&Scalar(high));
    }
    let zero = Scalar(0.0);
    let mut ratio = Scalar(1.0);
    if trust.adapts {
        ratio = x.at_most(&zero).choose(&ratio, &u.at_most(&zero).choose(&ratio, &(&x / &u)));
        if !trust.clip.is_nan() {
            let most = Scalar(trust.clip);
            ratio = most.below(&ratio).choose(&most, &ratio);
        }
    }
    if trust.debias == Debias::Step {
        ratio = ratio * (one / two);
    }
    Ok(ratio * trust.lr)
}

/// Writes the two factors of each job of clipped updates. See [`Clipping::factors`].
pub(in crate::kernels) fn update_factors(
    clipping: &Clipping,
    rates: &Rates<'_>,
    sums: &[UpdateSums],
    out: &[FlatView],
) -> Result<()> {
    let unit = if matches!(rates, Rates::Learning(_)) { followed_rate()? } else { Scalar(1.0) };
    for (job, (sums, out)) in sums.iter().zip(out).enumerate() {
        let mut rate = match rates.counter(job) {
            None => Scalar(rates.of(job)) * &unit,
            Some(counter) => {
                let step = first(&counter)?;
                let warms_up = matches!(rates, Rates::Relative { warms_up: true, .. });
                let most = if warms_up { &step * 1e-6 } else { Scalar(1e-2) };
                most.min(&(1.0 / step.sqrt()))
            }
        };
        let size = |squares: &FlatView| -> Result<Value> { Ok((first(squares)? / count(sums.numel)).sqrt()) };
        if !sums.param.is_empty() {
            let (size, floor) = (size(&sums.param)?, Scalar(clipping.floor));
            rate = rate * size.below(&floor).choose(&floor, &size);
        }
        let (ratio, one) = (size(&sums.update)? / clipping.threshold, Scalar(1.0));
        // A NaN ratio propagates.
        let divisor = ratio.below(&one).choose(&one, &ratio);
        write_numbers(out, &[&rate * clipping.grad_factor / divisor, &rate * clipping.weight_decay])?;
    }
    Ok(())
}

fn of<T>(each: &[T], job: usize) -> Result<&T> {
    each.get(job).ok_or_else(|| Error::Internal(format!("no entry for job {job}")))
}
