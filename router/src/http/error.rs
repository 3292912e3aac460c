//! Failures over HTTP: OpenAI's error object and the status of every kind, in one place.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::api::{Error, ErrorKind};

/// Seconds after which a client may try again when there is too much to do or nobody is there.
const RETRY_AFTER_S: HeaderValue = HeaderValue::from_static("1");

/// A failure as HTTP tells it.
#[derive(Debug)]
pub(super) struct Failure {
    status: StatusCode,
    code: Option<&'static str>,
    error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let (status, code) = match error.kind {
            ErrorKind::Invalid => (StatusCode::BAD_REQUEST, None),
            ErrorKind::Unauthenticated => (StatusCode::UNAUTHORIZED, Some("invalid_api_key")),
            ErrorKind::NotFound => (StatusCode::NOT_FOUND, Some("not_found")),
            ErrorKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, Some("request_too_large")),
            ErrorKind::Overloaded => (StatusCode::TOO_MANY_REQUESTS, Some("overloaded")),
            ErrorKind::Deadline => (StatusCode::GATEWAY_TIMEOUT, Some("deadline_exceeded")),
            ErrorKind::Unavailable => (StatusCode::SERVICE_UNAVAILABLE, Some("unavailable")),
            ErrorKind::Internal => (StatusCode::INTERNAL_SERVER_ERROR, Some("internal_error")),
        };
        Failure { status, code, error }
    }
}

impl Failure {
    /// What went wrong.
    pub(super) fn error(&self) -> &Error {
        &self.error
    }

    /// The same failure under a more telling status.
    pub(super) fn with_status(self, status: StatusCode) -> Self {
        Failure { status, ..self }
    }

    /// The same failure with OpenAI's code for it.
    pub(super) fn with_code(self, code: &'static str) -> Self {
        Failure { code: Some(code), ..self }
    }

    /// OpenAI's error object.
    pub(super) fn body(&self) -> Value {
        let kind = match self.error.kind {
            ErrorKind::Overloaded => "rate_limit_error",
            ErrorKind::Deadline => "timeout_error",
            ErrorKind::Unavailable | ErrorKind::Internal => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.error.message, "type": kind, "param": self.error.param, "code": self.code,
        }})
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        match self.error.kind {
            ErrorKind::Unauthenticated => {
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            ErrorKind::Overloaded | ErrorKind::Unavailable => {
                response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER_S);
            }
            _ => {}
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_its_status() {
        let cases = [
            (ErrorKind::Invalid, 400),
            (ErrorKind::Unauthenticated, 401),
            (ErrorKind::NotFound, 404),
            (ErrorKind::TooLarge, 413),
            (ErrorKind::Overloaded, 429),
            (ErrorKind::Internal, 500),
            (ErrorKind::Unavailable, 503),
            (ErrorKind::Deadline, 504),
        ];
        for (kind, status) in cases {
            let response = Failure::from(Error::new(kind, "m")).into_response();
            assert_eq!(response.status().as_u16(), status);
            assert_eq!(response.headers().contains_key("retry-after"), matches!(status, 429 | 503));
        }
    }
}
