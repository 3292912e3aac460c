//! How long an isolated prefill takes on a worker: `a * tokens + b * tokens^2`, the linear layers' share and the
//! attention's.
//!
//! Owns the two coefficients and how they are learned from completed jobs. What can go wrong is a measurement that says
//! little (a stalled machine, a job that was answered from a cache) or jobs that are all alike, from which only one
//! number can be learned; the fit bounds the pull of the first and falls back to scaling the configured shape for the second.

use std::time::Duration;

/// Coefficients of a worker's time per segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Seconds per token.
    pub linear: f64,
    /// Seconds per squared token.
    pub quadratic: f64,
}

impl Speed {
    /// Estimated time of a segment.
    pub fn time(&self, tokens: usize) -> Duration {
        let tokens = tokens as f64;
        let seconds = self.linear * tokens + self.quadratic * tokens * tokens;
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }
}

/// How speeds are learned.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeedConfig {
    /// The speed until a job has been measured, and after that the shape (quadratic to linear) that the fit leans to.
    /// Neither coefficient below zero, one of them above.
    pub prior: Speed,
    /// A job's weight falls by a factor e with every so many later jobs; above 1.
    pub memory_jobs: f64,
    /// A measurement counts as at most this factor above and below what was expected; above 1.
    pub outlier_factor: f64,
    /// Pull towards the prior's shape, in jobs. As (relative noise of a job / relative uncertainty of the shape)^2.
    pub shape_weight: f64,
}

impl Default for SpeedConfig {
    /// A small model on a few cores; the first completed job corrects the scale.
    fn default() -> Self {
        SpeedConfig {
            prior: Speed { linear: 1e-4, quadratic: 5e-9 },
            memory_jobs: 32.0,
            outlier_factor: 4.0,
            shape_weight: 0.02,
        }
    }
}

/// Exponentially weighted least squares of relative times.
///
/// With p = p1 + p2 the prior's linear and quadratic share of a job's time and t = measured / p, it minimises over the
/// scales (x, y) of the two shares the weighted sum of (x p1/p + y p2/p - t)^2 plus `shape_weight` times
/// (x - s)^2 + (y - s)^2, s being the weighted mean of t: pure scaling of the prior. So jobs of one length teach s and
/// nothing else, and jobs of different lengths teach both shares. Dividing by p makes short and long segments count alike.
#[derive(Clone, Debug)]
pub(super) struct SpeedModel {
    prior: Speed,
    speed: Speed,
    measured: u64,
    /// Weighted sums of: 1, t, and with u = p1/p, v = p2/p of uu, uv, vv, ut, vt.
    sums: [f64; 7],
}

impl SpeedModel {
    pub(super) fn new(config: &SpeedConfig) -> Self {
        let Speed { linear, quadratic } = config.prior;
        debug_assert!(linear >= 0.0 && quadratic >= 0.0 && linear + quadratic > 0.0, "prior: {:?}", config.prior);
        debug_assert!(config.memory_jobs > 1.0 && config.outlier_factor > 1.0 && config.shape_weight > 0.0);
        SpeedModel { prior: config.prior, speed: config.prior, measured: 0, sums: [0.0; 7] }
    }

    /// The present estimate.
    pub(super) fn speed(&self) -> Speed {
        self.speed
    }

    /// Number of jobs learned from.
    pub(super) fn measured(&self) -> u64 {
        self.measured
    }

    pub(super) fn learn(&mut self, tokens: usize, measured: Duration, config: &SpeedConfig) {
        let expected = self.speed.time(tokens).as_secs_f64();
        let seconds = measured.as_secs_f64();
        if tokens == 0 || seconds == 0.0 || expected == 0.0 {
            return;
        }
        // The first measurement is believed: the prior may be of another machine altogether.
        let factor = if self.measured == 0 { f64::INFINITY } else { config.outlier_factor };
        let seconds = seconds.clamp(expected / factor, expected * factor);

        let tokens = tokens as f64;
        let (linear, quadratic) = (self.prior.linear * tokens, self.prior.quadratic * tokens * tokens);
        let whole = linear + quadratic;
        let (u, v, t) = (linear / whole, quadratic / whole, seconds / whole);
        let keep = (-1.0 / config.memory_jobs).exp();
        for (sum, new) in self.sums.iter_mut().zip([1.0, t, u * u, u * v, v * v, u * t, v * t]) {
            *sum = *sum * keep + new;
        }
        self.measured += 1;
        self.speed = self.fit(config.shape_weight);
    }

    fn fit(&self, shape_weight: f64) -> Speed {
        let [jobs, t, uu, uv, vv, ut, vt] = self.sums;
        let scale = t / jobs;
        let (uu, vv) = (uu + shape_weight, vv + shape_weight);
        let (ut, vt) = (ut + shape_weight * scale, vt + shape_weight * scale);
        // Positive: uu vv >= uv^2 holds for the sums, and the weight is added to both.
        let determinant = uu * vv - uv * uv;
        let (mut x, mut y) = ((ut * vv - vt * uv) / determinant, (vt * uu - ut * uv) / determinant);
        // A share cannot take negative time: the best fit with it at zero.
        if x <= 0.0 {
            (x, y) = (0.0, vt / vv);
        } else if y <= 0.0 {
            (x, y) = (ut / uu, 0.0);
        }
        debug_assert!(x >= 0.0 && y >= 0.0 && (x + y).is_finite(), "scales {x} and {y}");
        Speed { linear: x * self.prior.linear, quadratic: y * self.prior.quadratic }
    }
}
