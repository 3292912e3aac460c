//! Which members fit together. Owns the comparison of a member's record with what this process serves, and counts of
//! members that did not fit. Cannot fail: a record that differs is the result, not an error.

use std::fmt;
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::record::{MemberRecord, Protocols};

/// What a member must serve to be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// blake3 over the model's configuration and tensors.
    pub fingerprint: [u8; 32],
    /// Dtype in which it computes.
    pub dtype: String,
    /// Name and version of its kernels; `None` takes any.
    pub kernel_set: Option<String>,
    /// Version of the part codec.
    pub format: u32,
}

/// What may differ between what is expected and what a member says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Field {
    /// Another id than the membership says answered.
    Id,
    /// Another role than the membership says answered.
    Role,
    /// Another model.
    Fingerprint,
    /// Another dtype.
    Dtype,
    /// Other kernels.
    KernelSet,
    /// Another version of the part codec.
    Format,
    /// No protocol version in common.
    Protocol,
}

impl Field {
    /// All of them.
    pub const ALL: [Field; 7] =
        [Field::Id, Field::Role, Field::Fingerprint, Field::Dtype, Field::KernelSet, Field::Format, Field::Protocol];

    /// Its name in records.
    pub fn as_str(self) -> &'static str {
        match self {
            Field::Id => "id",
            Field::Role => "role",
            Field::Fingerprint => "model_fingerprint",
            Field::Dtype => "dtype",
            Field::KernelSet => "kernel_set",
            Field::Format => "format_version",
            Field::Protocol => "protocol",
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The first field in which a member differs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} is {theirs} there and {ours} here")]
pub struct Mismatch {
    /// Which field.
    pub field: Field,
    /// What is expected.
    pub ours: String,
    /// What the member says.
    pub theirs: String,
}

impl Mismatch {
    pub(crate) fn new(field: Field, ours: impl fmt::Display, theirs: impl fmt::Display) -> Mismatch {
        Mismatch { field, ours: ours.to_string(), theirs: theirs.to_string() }
    }
}

impl Expected {
    /// The first difference to `record`; `None`: the member may be used. Of one that still loads its model, what
    /// depends on the model is not known yet and no difference.
    pub fn mismatch(&self, record: &MemberRecord) -> Option<Mismatch> {
        record.fingerprint.and_then(|theirs| self.another_model(theirs, record)).or_else(|| self.another_build(record))
    }

    fn another_model(&self, theirs: [u8; 32], record: &MemberRecord) -> Option<Mismatch> {
        if self.fingerprint != theirs {
            return Some(Mismatch::new(Field::Fingerprint, hex(&self.fingerprint), hex(&theirs)));
        }
        if self.dtype != record.dtype {
            return Some(Mismatch::new(Field::Dtype, &self.dtype, &record.dtype));
        }
        if let Some(kernel_set) = self.kernel_set.as_ref().filter(|own| **own != record.kernel_set) {
            return Some(Mismatch::new(Field::KernelSet, kernel_set, &record.kernel_set));
        }
        None
    }

    fn another_build(&self, record: &MemberRecord) -> Option<Mismatch> {
        if self.format != record.format {
            return Some(Mismatch::new(Field::Format, self.format, record.format));
        }
        if Protocols::OWN.negotiate(record.protocols).is_none() {
            return Some(Mismatch::new(Field::Protocol, Protocols::OWN, record.protocols));
        }
        None
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// How many members did not fit, by field. A member counts once per identity and difference, not once per attempt.
#[derive(Debug, Default)]
pub struct Mismatches([AtomicU64; Field::ALL.len()]);

impl Mismatches {
    /// Members that differed first in `field`.
    pub fn get(&self, field: Field) -> u64 {
        self.0[field as usize].load(Ordering::Relaxed)
    }

    pub(crate) fn count(&self, field: Field) {
        self.0[field as usize].fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Role;

    #[test]
    fn the_first_difference_is_told_with_both_values() {
        let record = MemberRecord {
            fingerprint: Some([1; 32]),
            dtype: "f32".into(),
            kernel_set: "portable-v1".into(),
            ..MemberRecord::loading("a".into(), Role::Combiner, vec![], 1)
        };
        let expected =
            Expected { fingerprint: [1; 32], dtype: "f32".into(), kernel_set: Some("portable-v1".into()), format: 1 };
        assert_eq!(expected.mismatch(&record), None);
        let differs = |change: fn(&mut MemberRecord)| {
            let mut other = record.clone();
            change(&mut other);
            let found = expected.mismatch(&other).expect("differs");
            (found.field, found.ours, found.theirs)
        };
        assert_eq!(differs(|r| r.fingerprint = Some([2; 32])), (Field::Fingerprint, "01".repeat(32), "02".repeat(32)));
        assert_eq!(differs(|r| r.dtype = "bf16".into()), (Field::Dtype, "f32".into(), "bf16".into()));
        assert_eq!(differs(|r| r.kernel_set = "x".into()), (Field::KernelSet, "portable-v1".into(), "x".into()));
        assert_eq!(differs(|r| r.format = 2), (Field::Format, "1".into(), "2".into()));
        let newer = |r: &mut MemberRecord| r.protocols = Protocols::new(2, 3).expect("a range");
        assert_eq!(differs(newer), (Field::Protocol, "1..=1".into(), "2..=3".into()));
        let loading = MemberRecord::loading("a".into(), Role::Combiner, vec![], 1);
        assert_eq!(expected.mismatch(&loading), None);
        assert_eq!(expected.mismatch(&MemberRecord { format: 2, ..loading }).expect("differs").field, Field::Format);
        let any = Expected { kernel_set: None, ..expected.clone() };
        assert_eq!(any.mismatch(&MemberRecord { kernel_set: "x".into(), ..record.clone() }), None);
    }

    #[test]
    fn every_field_has_its_own_count() {
        let counts = Mismatches::default();
        for (times, field) in Field::ALL.into_iter().enumerate() {
            (0..times).for_each(|_| counts.count(field));
        }
        for (times, field) in Field::ALL.into_iter().enumerate() {
            assert_eq!(counts.get(field), times as u64, "{field}");
        }
    }
}
