//! The retry budget: retries and hedges are a share of the work, so that trouble does not multiply itself.

use parking_lot::Mutex;

use crate::faults::FaultConfig;

/// A bucket of tokens, one per retry or hedge.
pub(crate) struct Budget {
    tokens: Mutex<f64>,
    burst: f64,
    per_segment: f64,
}

impl Budget {
    pub fn new(config: &FaultConfig) -> Self {
        let burst = config.budget_burst.max(0.0);
        Budget { tokens: Mutex::new(burst), burst, per_segment: config.budget_per_segment.max(0.0) }
    }

    /// A segment was given to a worker for the first time.
    pub fn earn(&self) {
        let mut tokens = self.tokens.lock();
        *tokens = (*tokens + self.per_segment).min(self.burst);
    }

    /// Take what a retry costs; false if there is not enough.
    pub fn spend(&self) -> bool {
        let mut tokens = self.tokens.lock();
        let enough = *tokens >= 1.0;
        if enough {
            *tokens -= 1.0;
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_is_earned_and_spent() {
        let budget = Budget::new(&FaultConfig { budget_burst: 2.0, budget_per_segment: 0.5, ..FaultConfig::default() });
        assert!(budget.spend() && budget.spend() && !budget.spend());
        budget.earn();
        assert!(!budget.spend(), "half is not enough");
        budget.earn();
        assert!(budget.spend() && !budget.spend());
        (0..100).for_each(|_| budget.earn());
        assert!(budget.spend() && budget.spend() && !budget.spend(), "no more than the burst");
    }
}
