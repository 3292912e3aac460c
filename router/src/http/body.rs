//! Reading a request's body: JSON, of bounded size, from a client that keeps sending. A body that is
//! too large is read on for a while and thrown away: closing the connection under a client that is
//! still sending would take the answer with it.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use futures::StreamExt;
use serde_json::Value;

use super::error::Failure;
use crate::api::{Error, ErrorKind};

/// What bodies are permitted.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Bytes of a body; as many again are thrown away before the connection is given up.
    pub(super) size: usize,
    /// Time that a client may be silent in the middle of a body.
    pub(super) silence: Duration,
}

/// Read the body of a request with these headers.
pub(super) async fn read_json(headers: &HeaderMap, body: Body, limits: Limits) -> Result<Value, Failure> {
    let sent = headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap_or_default());
    let essence = sent.map(|text| text.split(';').next().unwrap_or_default().trim().to_ascii_lowercase());
    let is_json = |t: &str| t == "application/json" || (t.starts_with("application/") && t.ends_with("+json"));
    // What `curl -d` says of any data that it is not told more of.
    let is_unsaid = |t: &str| t == "application/x-www-form-urlencoded" && !headers.contains_key(header::ORIGIN);
    if essence.is_some_and(|t| !is_json(&t) && !is_unsaid(&t)) {
        let message = "the body must be JSON: send the header 'content-type: application/json'";
        let failure = Failure::from(Error::new(ErrorKind::Invalid, message));
        return Err(failure.with_status(StatusCode::UNSUPPORTED_MEDIA_TYPE).with_code("unsupported_media_type"));
    }
    // A client that asks first is answered first.
    if headers.contains_key(header::EXPECT) && announced(headers).is_some_and(|bytes| bytes > limits.size) {
        return Err(too_large(limits.size));
    }
    let bytes = read(body, limits).await?;
    serde_json::from_slice(&bytes).map_err(|why| {
        let error = Error::new(ErrorKind::Invalid, format!("the body is not valid JSON: {why}"));
        Failure::from(error).with_code("invalid_json")
    })
}

async fn read(body: Body, limits: Limits) -> Result<Vec<u8>, Failure> {
    let mut stream = body.into_data_stream();
    let mut kept = Vec::new();
    let mut total = 0usize;
    loop {
        let next = tokio::time::timeout(limits.silence, stream.next()).await.map_err(|_| {
            let failure = Failure::from(Error::new(ErrorKind::Invalid, "the body did not arrive in time"));
            failure.with_status(StatusCode::REQUEST_TIMEOUT).with_code("request_timeout")
        })?;
        let chunk = match next {
            Some(Ok(chunk)) => chunk,
            Some(Err(why)) => {
                return Err(Error::new(ErrorKind::Invalid, format!("the body did not arrive: {why}")).into());
            }
            None if total > limits.size => return Err(too_large(limits.size)),
            None => return Ok(kept),
        };
        total += chunk.len();
        if total <= limits.size {
            kept.extend_from_slice(&chunk);
        } else if total > limits.size.saturating_mul(2) {
            return Err(too_large(limits.size));
        } else {
            kept = Vec::new();
        }
    }
}

fn announced(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok()
}

fn too_large(limit: usize) -> Failure {
    Error::new(ErrorKind::TooLarge, format!("the body is larger than the {limit} bytes that this server permits"))
        .into()
}
