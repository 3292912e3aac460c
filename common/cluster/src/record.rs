//! Who a member is. Owns ids, roles and records, and their translation from and to messages. A message that lacks
//! something or makes no sense is refused with the field's name; nothing else can go wrong.

use std::borrow::Borrow;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use hypic_proto::v1;
use rand::RngExt;
use serde::{Deserialize, Serialize};

/// Lowest protocol version that this build speaks.
pub const PROTOCOL_MIN: u32 = 1;
/// Highest protocol version that this build speaks.
pub const PROTOCOL_MAX: u32 = 1;

/// What a member does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Plans requests.
    Router,
    /// Computes entries.
    ScatterWorker,
    /// Composes and decodes.
    Combiner,
}

impl Role {
    /// Its name: `router`, `scatter-worker` or `combiner`.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Router => "router",
            Role::ScatterWorker => "scatter-worker",
            Role::Combiner => "combiner",
        }
    }

    /// As it stands in messages.
    pub fn to_proto(self) -> v1::MemberRole {
        match self {
            Role::Router => v1::MemberRole::Router,
            Role::ScatterWorker => v1::MemberRole::ScatterWorker,
            Role::Combiner => v1::MemberRole::Combiner,
        }
    }

    /// From the number in a message; `None` if it is unspecified or unknown.
    pub fn from_proto(number: i32) -> Option<Role> {
        match v1::MemberRole::try_from(number).ok()? {
            v1::MemberRole::Unspecified => None,
            v1::MemberRole::Router => Some(Role::Router),
            v1::MemberRole::ScatterWorker => Some(Role::ScatterWorker),
            v1::MemberRole::Combiner => Some(Role::Combiner),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// A name that is no role's.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown role `{0}`: use router, scatter-worker or combiner")]
pub struct UnknownRole(pub String);

impl FromStr for Role {
    type Err = UnknownRole;

    fn from_str(text: &str) -> Result<Role, UnknownRole> {
        match text {
            "router" => Ok(Role::Router),
            "scatter-worker" => Ok(Role::ScatterWorker),
            "combiner" => Ok(Role::Combiner),
            _ => Err(UnknownRole(text.to_owned())),
        }
    }
}

/// Identity of one run of one process; never an address. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MemberId(#[serde(with = "shared_text")] Arc<str>);

/// `Arc<str>` as text, without serde's feature for reference-counted pointers.
mod shared_text {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(text)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<str>, D::Error> {
        String::deserialize(deserializer).map(Arc::from)
    }
}

impl MemberId {
    /// Draw one: the role and 48 random bits, as in `scatter-worker-3f9ac21b44d0`.
    pub fn random(role: Role) -> MemberId {
        let bits = rand::rng().random::<u64>() >> 16;
        MemberId(format!("{role}-{bits:012x}").into())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for MemberId {
    fn from(text: &str) -> MemberId {
        MemberId(text.into())
    }
}

impl From<String> for MemberId {
    fn from(text: String) -> MemberId {
        MemberId(text.into())
    }
}

impl Borrow<str> for MemberId {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// A range of protocol versions, never empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Protocols {
    min: u32,
    max: u32,
}

impl Protocols {
    /// What this build speaks.
    pub const OWN: Protocols = Protocols { min: PROTOCOL_MIN, max: PROTOCOL_MAX };

    /// From the lowest and the highest version; `None` unless 1 <= `min` <= `max`.
    pub fn new(min: u32, max: u32) -> Option<Protocols> {
        (1 <= min && min <= max).then_some(Protocols { min, max })
    }

    /// The highest version that both speak.
    pub fn negotiate(self, other: Protocols) -> Option<u32> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }

    /// The versions.
    pub fn range(self) -> RangeInclusive<u32> {
        self.min..=self.max
    }
}

impl fmt::Display for Protocols {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..={}", self.min, self.max)
    }
}

/// Who a member is and what it serves.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemberRecord {
    /// Drawn at random when the process starts.
    pub id: MemberId,
    /// What it does.
    pub role: Role,
    /// Where its internal services are reached: HOST:PORT, best first.
    pub addresses: Vec<String>,
    /// blake3 over the model's configuration and tensors; `None` while the model is being loaded, and what else depends
    /// on the model is empty then.
    pub fingerprint: Option<[u8; 32]>,
    /// Dtype in which it computes: `f32` or `bf16`.
    pub dtype: String,
    /// Name and version of its kernels; entries are bit-identical within one.
    pub kernel_set: String,
    /// Version of the part codec.
    pub format: u32,
    /// Protocol versions that it speaks.
    pub protocols: Protocols,
    /// Of a combiner: bytes of a prefix state of no tokens.
    pub prefix_fixed_bytes: u64,
    /// Of a combiner: bytes that each of its tokens adds.
    pub prefix_token_bytes: u64,
    /// Of a combiner: bytes that prefix states may take.
    pub prefix_budget_bytes: u64,
}

/// A record in a message that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The message lacks it.
    #[error("a member record without `{0}`")]
    Missing(&'static str),
    /// The fingerprint has another length.
    #[error("a member record whose model_fingerprint has {0} bytes instead of 32")]
    Fingerprint(usize),
    /// The role is none of the known ones.
    #[error("a member record of unknown role {0}")]
    Role(i32),
    /// The versions are no range.
    #[error("a member record whose protocol range {0}..={1} is empty or begins below 1")]
    Protocols(u32, u32),
    /// The bytes are no record.
    #[error("not a member record: {0}")]
    Encoding(String),
}

impl MemberRecord {
    /// A member of this build that still loads its model.
    pub fn loading(id: MemberId, role: Role, addresses: Vec<String>, format: u32) -> MemberRecord {
        MemberRecord {
            id,
            role,
            addresses,
            fingerprint: None,
            dtype: String::new(),
            kernel_set: String::new(),
            format,
            protocols: Protocols::OWN,
            prefix_fixed_bytes: 0,
            prefix_token_bytes: 0,
            prefix_budget_bytes: 0,
        }
    }

    /// As it is kept in etcd: the encoded message.
    pub fn encode(&self) -> Vec<u8> {
        prost::Message::encode_to_vec(&v1::MemberRecord::from(self))
    }

    /// Read what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// If it is no record, or one that cannot be used.
    pub fn decode(bytes: &[u8]) -> Result<MemberRecord, RecordError> {
        let message: v1::MemberRecord =
            prost::Message::decode(bytes).map_err(|error| RecordError::Encoding(error.to_string()))?;
        message.try_into()
    }
}

impl From<&MemberRecord> for v1::MemberRecord {
    fn from(record: &MemberRecord) -> v1::MemberRecord {
        v1::MemberRecord {
            id: record.id.as_str().to_owned(),
            role: record.role.to_proto().into(),
            addresses: record.addresses.clone(),
            model_fingerprint: record.fingerprint.map(|bytes| bytes.to_vec()).unwrap_or_default().into(),
            dtype: record.dtype.clone(),
            kernel_set: record.kernel_set.clone(),
            format_version: record.format,
            protocol_min: record.protocols.min,
            protocol_max: record.protocols.max,
            prefix_fixed_bytes: record.prefix_fixed_bytes,
            prefix_token_bytes: record.prefix_token_bytes,
            prefix_budget_bytes: record.prefix_budget_bytes,
        }
    }
}

impl TryFrom<v1::MemberRecord> for MemberRecord {
    type Error = RecordError;

    fn try_from(message: v1::MemberRecord) -> Result<MemberRecord, RecordError> {
        if message.id.is_empty() {
            return Err(RecordError::Missing("id"));
        }
        let role = Role::from_proto(message.role).ok_or(RecordError::Role(message.role))?;
        let fingerprint = match message.model_fingerprint.as_ref() {
            [] => None,
            bytes => Some(<[u8; 32]>::try_from(bytes).map_err(|_| RecordError::Fingerprint(bytes.len()))?),
        };
        let protocols = Protocols::new(message.protocol_min, message.protocol_max)
            .ok_or(RecordError::Protocols(message.protocol_min, message.protocol_max))?;
        Ok(MemberRecord {
            id: message.id.into(),
            role,
            addresses: message.addresses,
            fingerprint,
            dtype: message.dtype,
            kernel_set: message.kernel_set,
            format: message.format_version,
            protocols,
            prefix_fixed_bytes: message.prefix_fixed_bytes,
            prefix_token_bytes: message.prefix_token_bytes,
            prefix_budget_bytes: message.prefix_budget_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> MemberRecord {
        MemberRecord {
            id: "combiner-0123456789ab".into(),
            role: Role::Combiner,
            addresses: vec!["10.0.0.1:7000".into(), "[::1]:7000".into()],
            fingerprint: Some(std::array::from_fn(|i| i as u8)),
            dtype: "bf16".into(),
            kernel_set: "avx512bf16-v1".into(),
            format: 3,
            protocols: Protocols::new(1, 4).expect("a range"),
            prefix_fixed_bytes: 5,
            prefix_token_bytes: 6,
            prefix_budget_bytes: 7,
        }
    }

    #[test]
    fn records_survive_encoding() {
        assert_eq!(MemberRecord::decode(&record().encode()), Ok(record()));
        let loading = MemberRecord::loading("worker-1".into(), Role::ScatterWorker, vec!["10.0.0.1:7000".into()], 3);
        assert_eq!(MemberRecord::decode(&loading.encode()), Ok(loading));
    }

    #[test]
    fn bad_records_are_refused_by_field() {
        let refused = |change: fn(&mut v1::MemberRecord)| {
            let mut message = v1::MemberRecord::from(&record());
            change(&mut message);
            MemberRecord::try_from(message).expect_err("refused")
        };
        assert_eq!(refused(|m| m.id.clear()), RecordError::Missing("id"));
        assert_eq!(refused(|m| m.role = 0), RecordError::Role(0));
        assert_eq!(refused(|m| m.role = 99), RecordError::Role(99));
        assert_eq!(refused(|m| m.model_fingerprint = vec![1; 31].into()), RecordError::Fingerprint(31));
        assert_eq!(refused(|m| m.protocol_min = 0), RecordError::Protocols(0, 4));
        assert_eq!(refused(|m| m.protocol_max = 0), RecordError::Protocols(1, 0));
        assert!(matches!(MemberRecord::decode(&[0xff; 9]), Err(RecordError::Encoding(_))));
    }

    #[test]
    fn roles_and_ids_read_as_written() {
        for role in [Role::Router, Role::ScatterWorker, Role::Combiner] {
            assert_eq!(role.to_string().parse(), Ok(role));
            assert_eq!(Role::from_proto(role.to_proto().into()), Some(role));
            let id = MemberId::random(role);
            let bits = id.as_str().strip_prefix(&format!("{role}-")).expect("begins with the role").to_owned();
            assert!(bits.len() == 12 && bits.bytes().all(|c| c.is_ascii_hexdigit()), "{id}");
            assert_ne!(id, MemberId::random(role));
        }
        assert!("worker".parse::<Role>().expect_err("no role").to_string().contains("scatter-worker"));
    }

    #[test]
    fn the_highest_common_protocol_is_chosen() {
        let range = |min, max| Protocols::new(min, max).expect("a range");
        assert_eq!(range(1, 3).negotiate(range(2, 5)), Some(3));
        assert_eq!(range(2, 5).negotiate(range(1, 3)), Some(3));
        assert_eq!(range(1, 2).negotiate(range(3, 4)), None);
        assert_eq!(Protocols::new(2, 1), None);
    }
}
