//! How long the entry of a segment is on its way from a worker: a latency, and its bytes at the rate of the worker's
//! link.
//!
//! Owns the rate, learned from transfers that happened, and how many bytes a token has, learned from the same. What can
//! go wrong is a transfer that says little (a paused peer, a tiny entry): sums over bytes and time make a transfer
//! count by what it moved, the pull of a single one is bounded, and what was seen long ago fades.

use std::time::Duration;

use tokio::time::Instant;

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
    /// What was seen of a worker's link counts for a factor e less after so long without a transfer: then the rate of all
    /// links together counts.
    pub fade: Duration,
}

impl LinkConfig {
    /// Links that cost nothing, such as those within a process.
    pub const FREE: LinkConfig = LinkConfig {
        latency: Duration::ZERO,
        bytes_per_second: f64::INFINITY,
        bytes_per_token: 0.0,
        memory_transfers: 16.0,
        outlier_factor: 4.0,
        fade: Duration::from_secs(30),
    };

    /// Of so many bytes at a rate.
    pub(super) fn time(&self, bytes: f64, rate: f64) -> Duration {
        let moving = Duration::try_from_secs_f64(bytes / rate).unwrap_or(Duration::MAX);
        self.latency.saturating_add(moving)
    }

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
    /// When the last transfer was seen.
    seen: Option<Instant>,
}

impl Link {
    /// Bytes per second; `None` until a transfer was seen.
    pub(super) fn rate(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    /// How much of what was seen still counts.
    fn freshness(&self, config: &LinkConfig) -> f64 {
        let age = self.seen.map_or(f64::INFINITY, |seen| seen.elapsed().as_secs_f64());
        (-age / config.fade.as_secs_f64().max(1e-3)).exp()
    }

    /// Bytes per second, drawn to `usual` the longer no transfer was seen: a worker whose link seems slow is not asked to
    /// send, so nothing else would ever correct it.
    pub(super) fn faded(&self, usual: f64, config: &LinkConfig) -> f64 {
        let Some(rate) = self.rate() else { return usual };
        let fresh = self.freshness(config);
        // The mean of the times, not of the rates.
        1.0 / (fresh / rate + (1.0 - fresh) / usual)
    }

    /// So many bytes took so long, latency included. `usual` is the rate of a link that was not measured.
    pub(super) fn learn(&mut self, bytes: u64, took: Duration, usual: f64, config: &LinkConfig) {
        if bytes == 0 {
            return;
        }
        let (rate, fresh) = (self.faded(usual, config), self.freshness(config));
        self.bytes *= fresh;
        self.seconds = self.bytes / rate;
        self.add(bytes, took, rate, config);
    }

    /// The same for a link that does not fade.
    pub(super) fn learn_lasting(&mut self, bytes: u64, took: Duration, config: &LinkConfig) {
        let rate = self.rate().unwrap_or(config.bytes_per_second);
        self.add(bytes, took, rate, config);
    }

    /// The very first one is bounded too: a stall would make a good link look bad for long. A link that is far from what
    /// was configured is found within a few transfers.
    fn add(&mut self, bytes: u64, took: Duration, rate: f64, config: &LinkConfig) {
        /// Clocks are no finer, and a rate has to stay finite.
        const LEAST: f64 = 1e-6;
        let mut seconds = took.saturating_sub(config.latency).as_secs_f64().max(LEAST);
        let expected = bytes as f64 / rate;
        // Links that are taken to cost nothing bound nothing.
        if expected > 0.0 {
            seconds = seconds.clamp(expected / config.outlier_factor, expected * config.outlier_factor);
        }
        let keep = config.keep();
        self.bytes = self.bytes * keep + bytes as f64;
        self.seconds = self.seconds * keep + seconds;
        self.seen = Some(Instant::now());
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

    const USUAL: f64 = 1e9;

    #[test]
    fn a_rate_begins_as_configured_and_follows_what_was_measured() {
        let (mut link, config) = (Link::default(), config());
        assert_eq!(config.time(1e6, link.faded(USUAL, &config)), Duration::from_millis(2));
        for (times, millis) in [(6, 10), (100, 5)] {
            (0..times).for_each(|_| link.learn(MIB, Duration::from_millis(1 + millis), USUAL, &config));
            let ratio = link.faded(USUAL, &config) * millis as f64 / 1e3 / MIB as f64;
            assert!((0.9..1.5).contains(&ratio), "{ratio}: a tenth of what was configured, after a few transfers");
        }
    }

    #[test]
    fn a_single_stall_has_a_bounded_pull_and_nothing_is_learned_from_nothing() {
        let (mut link, config) = (Link::default(), config());
        link.learn(0, Duration::from_secs(5), USUAL, &config);
        assert!(link.rate().is_none());
        link.learn(MIB, Duration::from_secs(100), USUAL, &config);
        let after = link.faded(USUAL, &config);
        assert!(after > 0.9 * USUAL / config.outlier_factor, "the first one: {after}");
        (0..50).for_each(|_| link.learn(MIB, Duration::from_millis(6), USUAL, &config));
        let before = link.faded(USUAL, &config);
        link.learn(MIB, Duration::from_secs(100), USUAL, &config);
        assert!(link.faded(USUAL, &config) > before / 2.0);
        link.learn(MIB, Duration::ZERO, USUAL, &config);
        assert!(link.faded(USUAL, &config).is_finite());
        let mut free = Link::default();
        assert_eq!(LinkConfig::FREE.time(1e12, free.faded(f64::INFINITY, &LinkConfig::FREE)), Duration::ZERO);
        free.learn(MIB, Duration::from_secs(1), f64::INFINITY, &LinkConfig::FREE);
        assert!(free.rate().is_some_and(|rate| (rate - MIB as f64).abs() < 1.0), "nothing was expected of it");
    }

    #[tokio::test(start_paused = true)]
    async fn a_link_that_sends_nothing_is_taken_for_a_usual_one_in_time() {
        let (mut link, config) = (Link::default(), config());
        (0..50).for_each(|_| link.learn(MIB, Duration::from_secs(1), USUAL, &config));
        assert!(link.faded(USUAL, &config) < USUAL / 100.0);
        tokio::time::advance(20 * config.fade).await;
        assert!(link.faded(USUAL, &config) > 0.99 * USUAL);
        link.learn(MIB, Duration::from_secs(1), USUAL, &config);
        let again = link.faded(USUAL, &config);
        assert!(again > 0.9 * USUAL / config.outlier_factor, "what is long ago does not count: {again}");
    }

    #[test]
    fn sizes_are_learned_by_the_token() {
        let (mut sizes, config) = (Sizes::default(), config());
        assert_eq!(sizes.bytes(100, &config), 1e5);
        (0..60).for_each(|_| sizes.learn(100, 500_000, &config));
        assert_eq!(sizes.bytes(10, &config).round(), 50_000.0);
    }
}
