//! Learning-rate factors of orthonormalized updates, from the shape of the whole matrix.

use crate::error::{Error, Result};

/// Factor of the learning rate for a matrix of `fan_out` rows and `fan_in` columns.
///
/// With an update whose singular values are all 1, the effective learning rate is `lr * factor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum LrScale {
    /// `1`: `lr` is the spectral norm of an update. 4096 x 1024: 1.
    None,
    /// `sqrt(fan_out / fan_in)`: `lr` is the RMS-to-RMS operator norm of an update. 4096 x 1024: 2; 1024 x
    /// 4096: 0.5.
    #[default]
    SpectralNorm,
    /// `0.2 * sqrt(max(fan_out, fan_in))`: `lr` is in units of `AdamW`'s, whose updates have an RMS of about
    /// 0.2 (arXiv:2502.16982). 4096 x 1024: 12.8.
    RmsNorm,
    /// `sqrt(fan_out / fan_in)`, torch's name for [`LrScale::SpectralNorm`]. 4096 x 1024: 2; 1024 x 4096: 0.5.
    SpectralUnclamped,
    /// `sqrt(max(1, fan_out / fan_in))`, torch's default for Muon. 4096 x 1024: 2; 1024 x 4096: 1.
    Original,
    /// `0.2 * sqrt(max(fan_out, fan_in))`, torch's name for [`LrScale::RmsNorm`]. 4096 x 1024: 12.8.
    MatchRmsAdamw,
}

impl LrScale {
    /// The variant called `name`; no name is [`LrScale::None`].
    ///
    /// # Errors
    /// [`Error::Value`] for an unknown name.
    pub(super) fn parse(name: Option<&str>) -> Result<Self> {
        match name {
            None => Ok(Self::None),
            Some("spectral_norm") => Ok(Self::SpectralNorm),
            Some("spectral_unclamped") => Ok(Self::SpectralUnclamped),
            Some("rms_norm") => Ok(Self::RmsNorm),
            Some("original") => Ok(Self::Original),
            Some("match_rms_adamw") => Ok(Self::MatchRmsAdamw),
            Some(other) => Err(Error::Value(format!(
                "adjust_lr must be spectral_norm, spectral_unclamped, rms_norm, match_rms_adamw, original or None, \
                 got {other:?}"
            ))),
        }
    }

    /// The factor for a matrix of `fan_out` outputs and `fan_in` inputs. A matrix without elements has factor
    /// 1.
    #[must_use]
    pub(super) fn factor(self, [fan_out, fan_in]: [u64; 2]) -> f64 {
        if fan_out == 0 || fan_in == 0 {
            return 1.0;
        }
        #[expect(clippy::cast_precision_loss, reason = "sizes below 2^53 are exact")]
        let (rows, cols) = (fan_out as f64, fan_in as f64);
        match self {
            Self::None => 1.0,
            Self::SpectralNorm | Self::SpectralUnclamped => (rows / cols).sqrt(),
            Self::RmsNorm | Self::MatchRmsAdamw => 0.2 * rows.max(cols).sqrt(),
            Self::Original => (rows / cols).max(1.0).sqrt(),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test may panic")]
mod tests {
    use super::*;

    #[test]
    fn factor_has_the_documented_values() {
        // (variant, 4096 x 1024, 1024 x 4096), computed manually: sqrt(4) = 2, 0.2 * sqrt(4096) = 12.8.
        let table = [
            (LrScale::None, 1.0, 1.0),
            (LrScale::SpectralNorm, 2.0, 0.5),
            (LrScale::SpectralUnclamped, 2.0, 0.5),
            (LrScale::RmsNorm, 12.8, 12.8),
            (LrScale::Original, 2.0, 1.0),
            (LrScale::MatchRmsAdamw, 12.8, 12.8),
        ];
        for (adjust, tall, wide) in table {
            assert!((adjust.factor([4096, 1024]) - tall).abs() < 1e-14, "{adjust:?}");
            assert!((adjust.factor([1024, 4096]) - wide).abs() < 1e-14, "{adjust:?}");
            assert!(adjust.factor([0, 3]).is_finite() && adjust.factor([3, 0]).is_finite(), "{adjust:?}");
        }
    }

    #[test]
    fn parse_knows_every_name_and_refuses_others() {
        let names = [
            (None, LrScale::None),
            (Some("spectral_norm"), LrScale::SpectralNorm),
            (Some("spectral_unclamped"), LrScale::SpectralUnclamped),
            (Some("rms_norm"), LrScale::RmsNorm),
            (Some("original"), LrScale::Original),
            (Some("match_rms_adamw"), LrScale::MatchRmsAdamw),
        ];
        for (name, expected) in names {
            assert_eq!(LrScale::parse(name).unwrap(), expected);
        }
        let message = LrScale::parse(Some("spectral")).unwrap_err().to_string();
        assert!(message.contains("adjust_lr must be") && message.contains("spectral"), "{message}");
    }
}
