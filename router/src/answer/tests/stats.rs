//! What telemetry is told of failures. Other tests of the process count as well, so counters are at least what is told.

use axum::body::{Body, to_bytes};
use hypic_telemetry::{Telemetry, TelemetryConfig};
use tower::ServiceExt;

use super::*;
use crate::api::{ModelCard, Sampling};
use crate::router::{Router, Served};

async fn scrape(telemetry: &Telemetry) -> String {
    let request = axum::http::Request::get("/metrics").body(Body::empty()).expect("a request");
    let response = telemetry.prometheus_routes().oneshot(request).await.expect("infallible");
    let bytes = to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// Value of the series whose line has all of `parts`.
fn value(text: &str, parts: &[&str]) -> Option<f64> {
    let line = text.lines().find(|line| !line.starts_with('#') && parts.iter().all(|part| line.contains(part)))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[tokio::test(start_paused = true)]
async fn failures_and_what_is_done_about_them_are_counted() {
    let config = TelemetryConfig { log_filter: "off".into(), ..TelemetryConfig::default() };
    let telemetry = Telemetry::start(&config).expect("started once");
    let least = |text: &str, parts: &[&str], least: f64| {
        let value = value(text, parts);
        assert!(value.is_some_and(|value| value >= least), "{parts:?} is {value:?} in\n{text}");
    };

    // Not delivered, then sent by another worker; then the combiner is lost.
    let faults = FaultConfig { hedge: false, ..FaultConfig::default() };
    let bench = Bench::new(&[&[Act::Undelivered], &[Act::Send]], 2, faults);
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[1].job_count() == 1).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    drop(plan);
    let plan = bench.combiners[1].plan().await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    let text = scrape(&telemetry).await;
    least(&text, &["hypic_transfer_failures_total{", "reason=\"other\""], 1.0);
    least(&text, &["hypic_retries_total{", "kind=\"transfer\""], 1.0);
    least(&text, &["hypic_transfer_io_bytes_total"], f64::from(1 << 20));
    least(&text, &["hypic_failovers_total"], 1.0);
    assert_eq!(value(&text, &["makespan_bound"]), None, "a lone segment bounds nothing");
    least(&text, &["hypic_stage_duration_seconds_count{", "stage=\"plan\""], 2.0);

    // One segment takes longer than all others.
    let bench = Bench::new(&[&[], &[]], 1, FaultConfig::default());
    drop(bench.ask(ask(&[ids(1, 300), ids(400, 10)])));
    least(&scrape(&telemetry).await, &["makespan_bound"], 1.0);

    // Slow.
    let bench = Bench::new(&[&[Act::Silence], &[]], 1, FaultConfig::default());
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.workers[1].job_count() == 1).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    least(&scrape(&telemetry).await, &["hypic_hedges_total{", "kind=\"scatter\""], 1.0);

    // Failed until nobody is left.
    let bench = Bench::new(&[&[Act::Fail; 9]], 1, FaultConfig::default());
    let mut client = bench.ask(ask(&[ids(1, 30)]));
    let plan = bench.combiners[0].plan().await;
    until(|| bench.combiners[0].jobs.lock().len() == 1).await;
    tokio::time::sleep(Duration::from_millis(5)).await;
    complete(&plan);
    client.report().await;
    let text = scrape(&telemetry).await;
    least(&text, &["hypic_retries_total{", "kind=\"scatter\""], 1.0);
    least(&text, &["last_resort"], 1.0);

    // The gauge is there for as long as the router.
    let closed = ["hypic_breakers", "state=\"closed\""];
    assert_eq!(value(&text, &closed), None);
    let served = Served {
        card: ModelCard { id: "m".into(), created: 0, context: 64 },
        space: space(),
        vocab: 64,
        reusable: None,
        compose: ComposeRule::Transition,
        eos: Arc::new([EOS]),
        sampling: Sampling::default(),
    };
    let router = Router::new(RouterConfig::default(), served, None, bench.core.fleet.clone());
    let text = scrape(&telemetry).await;
    assert_eq!(value(&text, &closed), Some(1.0), "{text}");
    assert_eq!(value(&text, &["hypic_breakers", "state=\"open\""]), Some(0.0));
    drop(router);
    assert_eq!(value(&scrape(&telemetry).await, &closed), None);
}
