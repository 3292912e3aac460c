//! Waits between attempts. Owns exponential backoff with full jitter: each wait is drawn evenly between nothing and a
//! bound that doubles up to a maximum. Cannot fail.

use std::time::Duration;

use rand::RngExt;
use serde::{Deserialize, Serialize};

/// How long to wait between attempts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BackoffConfig {
    /// Bound of the first wait.
    #[serde(with = "humantime_serde")]
    pub initial: Duration,
    /// Bound that later waits do not exceed.
    #[serde(with = "humantime_serde")]
    pub max: Duration,
}

impl Default for BackoffConfig {
    fn default() -> Self {
        BackoffConfig { initial: Duration::from_millis(100), max: Duration::from_secs(2) }
    }
}

/// The waits of one series of attempts.
#[derive(Clone, Debug)]
pub struct Backoff {
    config: BackoffConfig,
    bound: Duration,
}

impl Backoff {
    /// A series that begins.
    pub fn new(config: BackoffConfig) -> Backoff {
        let bound = config.initial.min(config.max);
        Backoff { config, bound }
    }

    /// The next wait.
    pub fn next_wait(&mut self) -> Duration {
        let wait = self.bound.mul_f64(rand::rng().random_range(0.0..=1.0));
        self.bound = self.bound.saturating_mul(2).min(self.config.max);
        wait
    }

    /// An attempt succeeded: begin again.
    pub fn reset(&mut self) {
        self.bound = self.config.initial.min(self.config.max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_stay_under_a_bound_that_doubles() {
        let config = BackoffConfig { initial: Duration::from_millis(100), max: Duration::from_millis(700) };
        let mut longest = [Duration::ZERO; 5];
        for _ in 0..500 {
            let mut backoff = Backoff::new(config.clone());
            for longest in &mut longest {
                *longest = (*longest).max(backoff.next_wait());
            }
            backoff.reset();
            assert!(backoff.next_wait() <= config.initial);
        }
        for (longest, bound) in longest.into_iter().zip([100, 200, 400, 700, 700]) {
            let bound = Duration::from_millis(bound);
            assert!(longest <= bound && longest > bound / 2, "{longest:?} of {bound:?}");
        }
    }
}
