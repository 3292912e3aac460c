//! API keys: who may ask. Keys are kept and compared as hashes, in constant time, so that neither a
//! key's text nor its length can be found out by trying or from a log. A key file without keys is an
//! error, never an open door.

use std::fmt;
use std::path::{Path, PathBuf};

use subtle::ConstantTimeEq;

use crate::api::{Error, ErrorKind};

/// Context of the hash of tenants' names.
const TENANT_CONTEXT: &str = "hypic tenant v1";

/// The tenant of a request, found by its API key.
#[derive(Clone, Debug)]
pub(crate) struct Tenant(pub String);

/// The keys that open the API.
#[derive(Clone)]
pub struct ApiKeys {
    hashes: Vec<blake3::Hash>,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    /// It cannot be read.
    #[error("cannot read the API key file {path}: {reason}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        reason: std::io::Error,
    },
    /// It has no keys.
    #[error("the API key file {path} has no keys: put one key on a line ('#' begins a comment)")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// A key that no client could send.
    #[error("line {line} of the API key file {path} is no key: use letters, digits and punctuation without spaces")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
    },
}

impl ApiKeys {
    /// The keys of a file: one per line; empty lines and those that begin with `#` are skipped.
    ///
    /// # Errors
    /// If the file cannot be read, has no keys, or has one that cannot stand in a header.
    pub fn from_file(path: &Path) -> Result<Self, KeyFileError> {
        let text =
            std::fs::read_to_string(path).map_err(|reason| KeyFileError::Read { path: path.to_owned(), reason })?;
        let mut hashes = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let key = line.trim();
            if key.is_empty() || key.starts_with('#') {
                continue;
            }
            if !key.bytes().all(|b| b.is_ascii_graphic()) {
                return Err(KeyFileError::Malformed { path: path.to_owned(), line: index + 1 });
            }
            hashes.push(blake3::hash(key.as_bytes()));
        }
        if hashes.is_empty() {
            return Err(KeyFileError::Empty { path: path.to_owned() });
        }
        Ok(ApiKeys { hashes })
    }

    /// Check the value of an `authorization` header; returns the name of its key's tenant, from which the key cannot be
    /// found.
    ///
    /// # Errors
    /// Of kind [`ErrorKind::Unauthenticated`] if it holds none of the keys.
    pub fn check(&self, authorization: Option<&[u8]>) -> Result<String, Error> {
        let Some(value) = authorization else {
            return Err(refused("no API key: send the header 'authorization: Bearer KEY'"));
        };
        let Some(key) = bearer(value) else {
            return Err(refused("the authorization header is not of the form 'Bearer KEY'"));
        };
        let given = blake3::hash(key);
        // Every key is compared, whichever matches.
        let known =
            self.hashes.iter().fold(subtle::Choice::from(0), |found, h| found | h.as_bytes().ct_eq(given.as_bytes()));
        if !bool::from(known) {
            return Err(refused("the API key is not known"));
        }
        // Not the hash that is compared: a tenant's name may get further than the keys do.
        Ok(blake3::Hash::from(blake3::derive_key(TENANT_CONTEXT, key)).to_hex().to_string())
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKeys({})", self.hashes.len())
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::Unauthenticated, message)
}

fn bearer(value: &[u8]) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let (scheme, key) = value.split_at_checked(SCHEME.len())?;
    let key = key.trim_ascii();
    (scheme.eq_ignore_ascii_case(SCHEME) && !key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("temporary file");
        file.write_all(text.as_bytes()).expect("writable");
        file
    }

    #[test]
    fn only_listed_keys_open() {
        let keys = ApiKeys::from_file(file("# staff\nalpha\n\n  beta  \n").path()).expect("two keys");
        for good in ["Bearer alpha", "bearer beta", "BEARER  alpha "] {
            keys.check(Some(good.as_bytes())).expect(good);
        }
        for bad in ["Bearer alph", "Bearer alphaa", "Bearer # staff", "Bearer ", "Basic alpha", "alpha", ""] {
            let error = keys.check(Some(bad.as_bytes())).expect_err(bad);
            assert_eq!(error.kind, ErrorKind::Unauthenticated);
            assert!(!error.message.contains("alpha"), "a key in an error");
        }
        keys.check(None).expect_err("no header");
        let tenant = |header: &str| keys.check(Some(header.as_bytes())).expect("a key");
        assert_eq!(tenant("Bearer alpha"), tenant("bearer  alpha"), "one key, one tenant");
        assert_ne!(tenant("Bearer alpha"), tenant("Bearer beta"));
        assert!(!tenant("Bearer alpha").contains(blake3::hash(b"alpha").to_hex().as_str()), "not what is compared");
        assert_eq!(format!("{keys:?}"), "ApiKeys(2)");
    }

    #[test]
    fn files_without_usable_keys_are_refused() {
        let empty = ApiKeys::from_file(file("# nobody\n\n").path()).expect_err("no keys");
        assert!(matches!(empty, KeyFileError::Empty { .. }));
        let spaced = ApiKeys::from_file(file("ok\nse cret\n").path()).expect_err("a space");
        assert!(matches!(spaced, KeyFileError::Malformed { line: 2, .. }));
        assert!(!spaced.to_string().contains("cret"));
        let missing = ApiKeys::from_file(Path::new("/nonexistent/keys")).expect_err("no file");
        assert!(missing.to_string().contains("/nonexistent/keys"));
    }
}
