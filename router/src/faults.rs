//! Settings of what a router does when members fail, are late, or go.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How failures are met.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultConfig {
    /// How often a segment is given to workers before the combiner computes it.
    pub attempts: usize,
    /// A segment is late after this factor times what it should take, the worker's backlog included.
    pub late_factor: f64,
    /// No segment is late before this.
    #[serde(with = "humantime_serde")]
    pub late_floor: Duration,
    /// The same while no job was measured yet, so that estimates are guesses.
    #[serde(with = "humantime_serde")]
    pub late_floor_unmeasured: Duration,
    /// A retry waits for a random time up to this, doubled with each further one.
    #[serde(with = "humantime_serde")]
    pub backoff_base: Duration,
    /// Longest of these waits.
    #[serde(with = "humantime_serde")]
    pub backoff_limit: Duration,
    /// Retries and hedges that may come at once.
    pub budget_burst: f64,
    /// Retries and hedges that each segment given to a worker adds to the budget.
    pub budget_per_segment: f64,
    /// A worker gets no work after so many real failures in a row.
    pub breaker_failures: u32,
    /// Until it is tried again after this.
    #[serde(with = "humantime_serde")]
    pub breaker_cool_down: Duration,
    /// Whether a request's last missing segment is given to an idle worker too.
    pub hedge: bool,
    /// It is after this factor times what it should take, the worker's backlog included.
    pub hedge_factor: f64,
    /// Not before this.
    #[serde(with = "humantime_serde")]
    pub hedge_floor: Duration,
    /// How long a request whose combiner is lost waits for another one.
    #[serde(with = "humantime_serde")]
    pub failover_wait: Duration,
    /// How often it looks for one meanwhile.
    #[serde(with = "humantime_serde")]
    pub failover_interval: Duration,
    /// How long a complete answer waits for what workers have to say of it.
    #[serde(with = "humantime_serde")]
    pub report_wait: Duration,
}

impl Default for FaultConfig {
    fn default() -> Self {
        FaultConfig {
            attempts: 3,
            late_factor: 4.0,
            late_floor: Duration::from_secs(2),
            late_floor_unmeasured: Duration::from_secs(10),
            backoff_base: Duration::from_millis(10),
            backoff_limit: Duration::from_millis(500),
            budget_burst: 64.0,
            budget_per_segment: 0.2,
            breaker_failures: 5,
            breaker_cool_down: Duration::from_secs(5),
            hedge: true,
            hedge_factor: 2.0,
            hedge_floor: Duration::from_millis(500),
            failover_wait: Duration::from_secs(10),
            failover_interval: Duration::from_millis(50),
            report_wait: Duration::from_secs(1),
        }
    }
}

impl FaultConfig {
    /// How long a segment may take that should take `expected`.
    pub(crate) fn late_after(&self, expected: Duration, measured: bool) -> Duration {
        let floor = if measured { self.late_floor } else { self.late_floor_unmeasured };
        scaled(expected, self.late_factor).max(floor)
    }

    /// When it is hedged.
    pub(crate) fn hedge_after(&self, expected: Duration) -> Duration {
        scaled(expected, self.hedge_factor).max(self.hedge_floor)
    }

    /// The wait before retry number `retry`, from 1: full jitter, `random` being in 0..1.
    pub(crate) fn backoff(&self, retry: usize, random: f64) -> Duration {
        let doublings = i32::try_from(retry.saturating_sub(1)).unwrap_or(i32::MAX).min(30);
        scaled(self.backoff_base, 2f64.powi(doublings)).min(self.backoff_limit).mul_f64(random.clamp(0.0, 1.0))
    }
}

/// A day at most, whatever the factor.
fn scaled(time: Duration, factor: f64) -> Duration {
    const DAY: Duration = Duration::from_secs(86_400);
    Duration::try_from_secs_f64(time.as_secs_f64() * factor).unwrap_or(DAY).min(DAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_within_their_bounds() {
        let config = FaultConfig::default();
        for retry in 1..40 {
            let most = config.backoff(retry, 1.0);
            assert!(most <= config.backoff_limit && most >= config.backoff_base);
            assert!(config.backoff(retry, 0.5) <= most);
            assert_eq!(config.backoff(retry, 0.0), Duration::ZERO);
        }
        assert_eq!(config.late_after(Duration::ZERO, true), config.late_floor);
        assert_eq!(config.late_after(Duration::ZERO, false), config.late_floor_unmeasured);
        assert_eq!(config.late_after(Duration::from_secs(3), true), Duration::from_secs(12));
        assert!(config.late_after(Duration::MAX, true) < Duration::from_secs(100_000));
    }

    #[test]
    fn settings_are_read_with_their_units() {
        let config: FaultConfig = serde_json::from_str(r#"{"failover_wait": "500ms"}"#).expect("one setting");
        assert_eq!(config, FaultConfig { failover_wait: Duration::from_millis(500), ..FaultConfig::default() });
        let whole = serde_json::to_string(&config).expect("JSON");
        assert_eq!(serde_json::from_str::<FaultConfig>(&whole).expect("read back"), config);
        for wrong in [r#"{"failover_wait": 1}"#, r#"{"failover_wait": "-1s"}"#, r#"{"tries": 3}"#] {
            serde_json::from_str::<FaultConfig>(wrong).expect_err(wrong);
        }
    }
}
