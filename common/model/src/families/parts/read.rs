//! Readers of single keys, with the checks that several families make.

use serde_json::Value;

use crate::config::MAX_SIZE;
use crate::{Config, ModelError};

/// The first of `keys`, names of one parameter, that the configuration has; the first of all if it has none.
///
/// # Errors
/// If it has two with different values.
pub fn spelling<'k>(c: &Config, keys: &[&'k str]) -> Result<&'k str, ModelError> {
    let found = spelled(c, keys, |key| Ok(c.get(key)))?;
    Ok(found.map_or(keys[0], |(key, _)| key))
}

/// The first of `keys`, names of one parameter, at which `read` finds a value, and that value.
///
/// # Errors
/// If there are two with different values, or `read` fails.
pub fn spelled<'k, T: PartialEq>(
    c: &Config,
    keys: &[&'k str],
    read: impl Fn(&str) -> Result<Option<T>, ModelError>,
) -> Result<Option<(&'k str, T)>, ModelError> {
    let mut found: Option<(&str, T)> = None;
    for key in keys {
        let Some(value) = read(key)? else { continue };
        match &found {
            None => found = Some((key, value)),
            Some((first, known)) if *known != value => {
                return Err(c.wrong(key, format!("differs from {}, another name for the same", c.name(first))));
            }
            Some(_) => {}
        }
    }
    Ok(found)
}

/// The extent at the first of `keys`, names of one parameter, that is there; with that name.
///
/// # Errors
/// As [`spelling`]; or if none is there, or it is no extent.
pub fn size<'k>(c: &Config, keys: &[&'k str]) -> Result<(&'k str, usize), ModelError> {
    let key = spelling(c, keys)?;
    let missing = || c.wrong(key, format!("is missing (names of it: {})", keys.join(", ")));
    Ok((key, c.opt_size(key)?.ok_or_else(missing)?))
}

/// A list of whole numbers, if the key is there.
///
/// # Errors
/// If it is something else.
pub fn opt_usizes(c: &Config, key: &str) -> Result<Option<Vec<usize>>, ModelError> {
    let Some(value) = c.get(key) else { return Ok(None) };
    let number = |v: &Value| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let numbers: Option<Vec<usize>> = value.as_array().and_then(|list| list.iter().map(number).collect());
    numbers.map(Some).ok_or_else(|| c.wrong(key, "must be a list of whole numbers"))
}

/// `whole` must be a multiple of `part`.
///
/// # Errors
/// If it is not.
pub fn divides(c: &Config, whole: (&str, usize), part: (&str, usize)) -> Result<(), ModelError> {
    if !whole.1.is_multiple_of(part.1) {
        let problem = format!("is {}, which is no multiple of {} = {}", whole.1, part.0, part.1);
        return Err(c.wrong(whole.0, problem));
    }
    Ok(())
}

/// `heads` heads of `width` must not be wider than any model is.
///
/// # Errors
/// If they are.
pub fn bounded(c: &Config, heads: (&str, usize), width: (&str, usize)) -> Result<(), ModelError> {
    if heads.1 * width.1 > MAX_SIZE {
        let problem = format!("{} heads of {} = {} are wider than {MAX_SIZE}", heads.1, width.0, width.1);
        return Err(c.wrong(heads.0, problem));
    }
    Ok(())
}

/// Refuse any value at one of `keys` but `expected` (or none).
///
/// # Errors
/// If one has another.
pub fn only(c: &Config, keys: &[&str], expected: impl Into<Value>) -> Result<(), ModelError> {
    let expected = expected.into();
    keys.iter().try_for_each(|key| c.only(key, &expected))
}

/// A finite number, or the default; without a default it must be there.
///
/// # Errors
/// If it is something else.
pub fn factor(c: &Config, key: &str, default: Option<f64>) -> Result<f32, ModelError> {
    let value = match c.opt_f64(key)?.or(default) {
        Some(value) => value,
        None => return Err(c.wrong(key, "is missing")),
    };
    if !(value as f32).is_finite() {
        return Err(c.wrong(key, format!("must be within the range of f32, is {value}")));
    }
    Ok(value as f32)
}
