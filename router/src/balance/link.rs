//! How long the entry of a segment is on its way from a worker: a latency, and its bytes at the rate of the worker's
//! link.
//!
//! Owns the rate, learned from transfers that happened, and how many bytes a token has, learned from the same. What can
//! go wrong is a transfer that says little (a paused peer, a tiny entry): sums over bytes and time make a transfer
//! count by what it moved, and the pull of a single one is bounded.

use std::time::Duration;

/// What is expected of links until transfers have been seen, and how they are learned.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkConfig {
    /// Of any transfer, whatever its size.
    pub latency: Duration,
    /// Bytes per second until a transfer was seen; above 0, may be infinite.
    pub bytes_per_second: f64,
    /// Bytes of a token's share of an entry until a transfer was seen.
    pub bytes_per_token: f64,
    /// A transfer's weight falls by a factor e with every so many later ones; above 1.
    pub memory_transfers: f64,
    /// A measurement counts as at most this factor above and below what was expected; above 1.
    pub outlier_factor: f64,
}

impl LinkConfig {
    /// Links that cost nothing, such as those within a process.
    pub const FREE: LinkConfig = LinkConfig {
        latency: Duration::ZERO,
        bytes_per_second: f64::INFINITY,
        bytes_per_token: 0.0,
        memory_transfers: 16.0,
        outlier_factor: 4.0,
    };

    fn keep(&self) -> f64 {
        debug_assert!(self.memory_transfers > 1.0 && self.outlier_factor > 1.0);
        (-1.0 / self.memory_transfers).exp()
    }
}

/// Weighted sums over transfers.
#[derive(Clone, Debug, Default)]
pub(super) struct Link {
    bytes: f64,
    seconds: f64,
}

impl Link {
    pub(super) fn is_measured(&self) -> bool {
        self.seconds > 0.0
    }

    /// Bytes per second.
    pub(super) fn rate(&self, config: &LinkConfig) -> f64 {
        if self.is_measured() { self.bytes / self.seconds } else { config.bytes_per_second }
    }

    pub(super) fn time(&self, bytes: f64, config: &LinkConfig) -> Duration {
        let moving = Duration::try_from_secs_f64(bytes / self.rate(config)).unwrap_or(Duration::MAX);
        config.latency.saturating_add(moving)
    }

    /// So many bytes took so long, latency included.
    pub(super) fn learn(&mut self, bytes: u64, took: Duration, config: &LinkConfig) {
        /// Clocks are no finer, and a rate has to stay finite.
        const LEAST: f64 = 1e-6;
        if bytes == 0 {
            return;
        }
        let mut seconds = took.saturating_sub(config.latency).as_secs_f64().max(LEAST);
        // The first one is believed: the configured rate may be of another network altogether.
        if self.is_measured() {
            let expected = bytes as f64 / self.rate(config);
            seconds = seconds.clamp(expected / config.outlier_factor, expected * config.outlier_factor);
        }
        let keep = config.keep();
        self.bytes = self.bytes * keep + bytes as f64;
        self.seconds = self.seconds * keep + seconds;
    }
}

/// Bytes of entries by their tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Sizes {
    bytes: f64,
    tokens: f64,
}

impl Sizes {
    pub(super) fn bytes(&self, tokens: usize, config: &LinkConfig) -> f64 {
        let each = if self.tokens > 0.0 { self.bytes / self.tokens } else { config.bytes_per_token };
        each * tokens as f64
    }

    pub(super) fn learn(&mut self, tokens: usize, bytes: u64, config: &LinkConfig) {
        let keep = config.keep();
        self.bytes = self.bytes * keep + bytes as f64;
        self.tokens = self.tokens * keep + tokens as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn config() -> LinkConfig {
        let latency = Duration::from_millis(1);
        LinkConfig { latency, bytes_per_second: 1e9, bytes_per_token: 1e3, ..LinkConfig::FREE }
    }

    #[test]
    fn a_rate_begins_as_configured_and_follows_what_was_measured() {
        let (mut link, config) = (Link::default(), config());
        assert_eq!(link.time(1e6, &config), Duration::from_millis(2));
        // 1 MiB in 10 ms behind the latency: a tenth of what was configured.
        link.learn(MIB, Duration::from_millis(11), &config);
        let rate = link.rate(&config);
        assert!((rate - MIB as f64 / 0.01).abs() < 1.0, "{rate}");
        (0..100).for_each(|_| link.learn(MIB, Duration::from_millis(6), &config));
        let rate = link.rate(&config);
        assert!((rate / (MIB as f64 / 0.005) - 1.0).abs() < 0.02, "{rate}");
    }

    #[test]
    fn a_single_stall_has_a_bounded_pull_and_nothing_is_learned_from_nothing() {
        let (mut link, config) = (Link::default(), config());
        link.learn(0, Duration::from_secs(5), &config);
        assert!(!link.is_measured());
        (0..50).for_each(|_| link.learn(MIB, Duration::from_millis(6), &config));
        let before = link.rate(&config);
        link.learn(MIB, Duration::from_secs(100), &config);
        assert!(link.rate(&config) > before / 2.0);
        link.learn(MIB, Duration::ZERO, &config);
        assert!(link.rate(&config).is_finite());
        assert_eq!(Link::default().time(1e12, &LinkConfig::FREE), Duration::ZERO);
    }

    #[test]
    fn sizes_are_learned_by_the_token() {
        let (mut sizes, config) = (Sizes::default(), config());
        assert_eq!(sizes.bytes(100, &config), 1e5);
        (0..60).for_each(|_| sizes.learn(100, 500_000, &config));
        assert_eq!(sizes.bytes(10, &config).round(), 50_000.0);
    }
}
