//! Waiting for what becomes true by itself. What can go wrong: it does not; that fails the test with its name.

use std::time::{Duration, Instant};

/// How often a condition is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Wait until `found` gives something.
///
/// # Panics
/// With `what`, if it does not within `limit`.
pub async fn until<T>(limit: Duration, what: &str, found: impl AsyncFnMut() -> Option<T>) -> T {
    until_told(limit, || what.to_string(), found).await
}

/// As [`until`], with something that is known only in the end.
///
/// # Panics
/// As [`until`].
pub async fn until_told<T>(limit: Duration, what: impl Fn() -> String, mut found: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = found().await {
            return value;
        }
        assert!(began.elapsed() < limit, "not within {limit:?}: {}", what());
        tokio::time::sleep(POLL).await;
    }
}
