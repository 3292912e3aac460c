//! The deadline of a gRPC call: its `grpc-timeout`, up to eight digits and a unit. A malformed one is
//! an error: to ignore it would be to wait forever for a client that does not.

use std::time::Duration;

use tonic::metadata::MetadataMap;

use crate::api::Error;

const KEY: &str = "grpc-timeout";

/// Time that the caller gives; `None`: no limit.
///
/// # Errors
/// If it is malformed.
pub(super) fn of_call(metadata: &MetadataMap) -> Result<Option<Duration>, Error> {
    let Some(value) = metadata.get(KEY) else {
        return Ok(None);
    };
    let malformed = || Error::invalid(KEY, "grpc-timeout is malformed: up to eight digits and one of H M S m u n");
    value.to_str().ok().and_then(parse).map(Some).ok_or_else(malformed)
}

fn parse(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    match unit {
        "H" => Some(Duration::from_secs(count * 3600)),
        "M" => Some(Duration::from_secs(count * 60)),
        "S" => Some(Duration::from_secs(count)),
        "m" => Some(Duration::from_millis(count)),
        "u" => Some(Duration::from_micros(count)),
        "n" => Some(Duration::from_nanos(count)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_and_malformed_values() {
        assert_eq!(parse("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse("2M"), Some(Duration::from_secs(120)));
        assert_eq!(parse("1500m"), Some(Duration::from_millis(1500)));
        assert_eq!(parse("0n"), Some(Duration::ZERO));
        for bad in ["", "S", "1", "-1S", "+1S", "123456789S", "1.5S", "1s", "1 S", "1\u{e9}"] {
            assert_eq!(parse(bad), None, "{bad:?}");
        }
    }
}
