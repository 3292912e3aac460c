//! What members export. What can go wrong: a name that no member has counts as a failure of the test, not as zero.

use std::cell::RefCell;
use std::time::Duration;

use hypic_test_support::until_told;
use reqwest::Client;
use serde_json::Value;

use crate::cluster::Member;

/// Gauges of work under way, by role: all zero when nobody asks.
const WORK: [(&str, &[&str]); 3] = [
    (
        "combiner",
        &[
            "hypic_sequences",
            "hypic_sequences_size_bytes",
            "hypic_requests_waiting",
            "hypic_transfers_open",
            "hypic_cache_flights",
            "hypic_jobs",
            "hypic_jobs_tokens",
            "hypic_calls_open",
        ],
    ),
    (
        "scatter-worker",
        &[
            "hypic_jobs",
            "hypic_jobs_tokens",
            "hypic_deliveries_open",
            "hypic_calls_open",
            "hypic_cache_flights",
            // A combiner's kept states hold entries; a worker's are held by work alone.
            "hypic_cache_pinned_bytes",
        ],
    ),
    ("router", &["hypic_requests_open", "hypic_plans_open", "hypic_jobs_out", "hypic_backlog_milliseconds"]),
];
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

/// What a member at HOST:PORT sees of the others; `None` if it does not answer.
pub async fn members(address: &str) -> Option<Vec<Value>> {
    let client = Client::builder().no_proxy().timeout(SCRAPE).build().expect("a client");
    let text = client.get(format!("http://{address}/members")).send().await.ok()?.text().await.ok()?;
    serde_json::from_str::<Value>(&text).ok()?["members"].as_array().cloned()
}

/// Status of a GET, such as of /ready; `None` if nobody answers.
pub async fn status(address: &str, path: &str) -> Option<u16> {
    let client = Client::builder().no_proxy().timeout(SCRAPE).build().expect("a client");
    Some(client.get(format!("http://{address}{path}")).send().await.ok()?.status().as_u16())
}

/// Wait until none of the members has anything under way: no job, slot, stream or byte is leaked.
///
/// # Panics
/// If one still has after `limit`, telling which and what, or if it does not export a gauge that it should.
pub async fn assert_idle(members: &[Member], limit: Duration) {
    let began = tokio::time::Instant::now();
    for member in members {
        let gauges = WORK.iter().find(|(role, _)| *role == member.role).expect("one of the roles").1;
        let left = limit.saturating_sub(began.elapsed()).max(SCRAPE);
        let last = RefCell::new(String::new());
        let idle = async || {
            let Some(samples) = scrape(&member.metrics).await else {
                *last.borrow_mut() = "no answer".to_string();
                return None;
            };
            let values = gauges.iter().map(|gauge| (*gauge, samples.sum(gauge, "")));
            let busy: Vec<_> = values.filter(|(_, value)| *value != Some(0.0)).collect();
            *last.borrow_mut() = format!("{busy:?}");
            busy.is_empty().then_some(())
        };
        let what = || format!("{} {} has nothing under way, but {}", member.role, member.id, last.borrow());
        until_told(left, what, idle).await;
    }
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
