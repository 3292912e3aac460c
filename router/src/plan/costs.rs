//! What work is reckoned to cost when a combiner and workers are chosen. Only the beginning: speeds and links are learned
//! as work is done.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::balance::LinkConfig;

/// What work is reckoned to cost when a combiner and the workers are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PlanCosts {
    /// Of any transfer of an entry, whatever its size.
    #[serde(with = "humantime_serde")]
    pub transfer: Duration,
    /// Bytes per second of a transfer, until transfers were seen; at least 1.
    pub bytes_per_second: u64,
    /// Bytes of a token's share of an entry, until transfers were seen.
    pub bytes_per_token: u64,
    /// A request that waits at a combiner, to one that comes after it.
    #[serde(with = "humantime_serde")]
    pub waiting: Duration,
    /// An answer that is under way at a combiner, to one that comes after it.
    #[serde(with = "humantime_serde")]
    pub sequence: Duration,
}

impl Default for PlanCosts {
    fn default() -> Self {
        PlanCosts {
            transfer: Duration::from_micros(500),
            bytes_per_second: 2_000_000_000,
            bytes_per_token: 10_000,
            waiting: Duration::from_millis(250),
            sequence: Duration::from_millis(2),
        }
    }
}

impl PlanCosts {
    /// What links are taken for until transfers were seen.
    pub(crate) fn links(&self) -> LinkConfig {
        LinkConfig {
            latency: self.transfer,
            bytes_per_second: self.bytes_per_second.max(1) as f64,
            bytes_per_token: self.bytes_per_token as f64,
            ..LinkConfig::FREE
        }
    }
}
