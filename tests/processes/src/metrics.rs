//! What members export. What can go wrong: a name that no member has counts as a failure of the test, not as zero.

use std::time::Duration;

use reqwest::Client;

use crate::program::until;

/// Gauges of work under way: all zero when nobody asks.
const WORK: [&str; 3] = ["hypic_sequences", "hypic_requests_waiting", "hypic_transfers_open"];
/// What one scrape may take.
const SCRAPE: Duration = Duration::from_secs(2);

/// One member's metrics.
#[derive(Clone, Debug)]
pub struct Samples(Vec<(String, f64)>);

impl Samples {
    fn parse(text: &str) -> Samples {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let read = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            Some((series.to_string(), value.parse().ok()?))
        };
        Samples(lines.filter_map(read).collect())
    }

    /// Sum of a metric's series whose labels contain `label`; `None` if there is no such series.
    pub fn sum(&self, name: &str, label: &str) -> Option<f64> {
        let mine = |series: &str| {
            let labels = series.strip_prefix(name).map(|rest| rest.strip_prefix("_total").unwrap_or(rest));
            labels.is_some_and(|rest| (rest.is_empty() || rest.starts_with('{')) && rest.contains(label))
        };
        let found: Vec<f64> = self.0.iter().filter(|(series, _)| mine(series)).map(|(_, value)| *value).collect();
        (!found.is_empty()).then(|| found.iter().sum())
    }
}

/// Ask a member at HOST:PORT for its metrics; `None` if it does not answer.
pub async fn scrape(address: &str) -> Option<Samples> {
    let client = Client::builder().no_proxy().timeout(SCRAPE).build().expect("a client");
    let response = client.get(format!("http://{address}/metrics")).send().await.ok()?.error_for_status().ok()?;
    response.text().await.ok().as_deref().map(Samples::parse)
}

/// Wait until none of the members, each a name and HOST:PORT, has work under way.
///
/// # Panics
/// If one still has after `limit`, telling which and what, or if combiners export no gauge of work.
pub async fn settled(members: &[(String, String)], limit: Duration) {
    let began = tokio::time::Instant::now();
    let mut known = 0;
    for (name, address) in members {
        let mut last = String::new();
        let left = limit.saturating_sub(began.elapsed()).max(SCRAPE);
        let check = async || {
            let samples = scrape(address).await?;
            let values = WORK.map(|gauge| samples.sum(gauge, ""));
            last = format!("{WORK:?} {values:?}");
            values.iter().flatten().all(|value| *value == 0.0).then_some(values.iter().flatten().count())
        };
        known += until(left, &format!("{name} has nothing under way"), check).await;
    }
    // Combiners have such work; when all are dead, nobody has.
    let combiners = members.iter().any(|(name, _)| name.starts_with("combiner"));
    assert!(known > 0 || !combiners, "no member exports any of {WORK:?}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_take_one_metric_only() {
        let text = "# TYPE a gauge\na{b=\"c\",d=\"e\"} 2\na{b=\"f\"} 3\na_more 7\nn_total{b=\"c\"} 4\n";
        let samples = Samples::parse(text);
        assert_eq!(samples.sum("a", ""), Some(5.0));
        assert_eq!(samples.sum("a", "b=\"c\""), Some(2.0));
        assert_eq!(samples.sum("n", ""), Some(4.0));
        assert_eq!(samples.sum("absent", ""), None);
    }
}
