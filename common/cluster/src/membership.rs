//! Who the members are. Owns the view, a list of targets to dial: fixed by configuration, or kept by etcd. A list that
//! cannot be read is refused at the start; later nothing fails, the last view serves.

use std::sync::Arc;

use tokio::sync::watch;

use crate::etcd::{EtcdConfig, EtcdMembership};
use crate::record::{MemberRecord, Role, UnknownRole};

/// A member as the membership lists it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// What it should be.
    pub role: Role,
    /// Where it should answer: HOST:PORT, best first.
    pub addresses: Vec<String>,
    /// Who it should be; `None`: whoever answers.
    pub record: Option<MemberRecord>,
}

/// All members that the membership lists.
pub type View = Arc<[Target]>;

/// A membership that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// An entry of the static list is not ROLE=HOST:PORT.
    #[error("member `{0}` is not ROLE=HOST:PORT, for example combiner=10.0.0.7:7070")]
    Form(String),
    /// An entry of the static list names no role.
    #[error("member `{entry}`: {reason}")]
    Role {
        /// The entry.
        entry: String,
        /// What is wrong.
        reason: UnknownRole,
    },
    /// An entry of the static list names no port.
    #[error("member `{0}` has no port from 1 to 65535 behind its host")]
    Port(String),
    /// Two entries of the static list name the same address.
    #[error("members name {0} twice: list every address once")]
    Twice(String),
    /// The configuration of etcd cannot work.
    #[error("etcd: {0}")]
    Etcd(String),
}

/// Read a static list of `ROLE=HOST:PORT`.
///
/// # Errors
/// If an entry is not of that form, or an address stands there twice.
pub fn parse_static<S: AsRef<str>>(entries: &[S]) -> Result<Vec<(Role, String)>, MembershipError> {
    let mut members: Vec<(Role, String)> = Vec::with_capacity(entries.len());
    for entry in entries {
        let entry = entry.as_ref().trim();
        let form = || MembershipError::Form(entry.to_owned());
        let (role, address) = entry.split_once('=').ok_or_else(form)?;
        let role = role.parse().map_err(|reason| MembershipError::Role { entry: entry.to_owned(), reason })?;
        let (host, port) = address.rsplit_once(':').ok_or_else(form)?;
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.is_empty() || host.contains(['/', ' ', '=']) || (host.contains(':') && !bracketed) {
            return Err(form());
        }
        if !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(MembershipError::Port(entry.to_owned()));
        }
        if members.iter().any(|(_, known)| known == address) {
            return Err(MembershipError::Twice(address.to_owned()));
        }
        members.push((role, address.to_owned()));
    }
    Ok(members)
}

/// Where the view comes from.
#[derive(Debug)]
pub enum Membership {
    /// A fixed list.
    Static(watch::Sender<View>),
    /// etcd.
    Etcd(EtcdMembership),
}

impl Membership {
    /// A fixed list of roles and addresses; the records come from asking.
    pub fn fixed(members: Vec<(Role, String)>) -> Membership {
        let target = |(role, address)| Target { role, addresses: vec![address], record: None };
        Membership::Static(watch::Sender::new(members.into_iter().map(target).collect()))
    }

    /// The members that etcd keeps; `own` is entered there until [`leave`](Self::leave), `None` only watches. Returns
    /// at once: etcd may be away.
    ///
    /// # Errors
    /// If the configuration cannot work, or there is no thread to be had.
    pub fn etcd(config: EtcdConfig, own: Option<MemberRecord>) -> Result<Membership, MembershipError> {
        EtcdMembership::start(config, own).map(Membership::Etcd)
    }

    /// The members, now and from now on.
    pub fn view(&self) -> watch::Receiver<View> {
        match self {
            Membership::Static(view) => view.subscribe(),
            Membership::Etcd(etcd) => etcd.view(),
        }
    }

    /// Whether the view was ever complete; before, it is empty.
    pub fn seen(&self) -> bool {
        match self {
            Membership::Static(_) => true,
            Membership::Etcd(etcd) => etcd.seen(),
        }
    }

    /// Whether this process stands in the membership now, as far as it knows. Always with a fixed list.
    pub fn registered(&self) -> bool {
        match self {
            Membership::Static(_) => true,
            Membership::Etcd(etcd) => etcd.registered(),
        }
    }

    /// Enter a new record of this process in place of its first one: it has loaded its model.
    pub fn update(&self, own: MemberRecord) {
        if let Membership::Etcd(etcd) = self {
            etcd.update(own);
        }
    }

    /// Take this process out of the membership, as far as that is possible in the configured time. The view stays.
    pub async fn leave(&self) {
        if let Membership::Etcd(etcd) = self {
            etcd.leave().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_lists_are_read() {
        let read = parse_static(&["router=127.0.0.1:1", " combiner=host.local:7070", "scatter-worker=[::1]:65535"]);
        let expected = [
            (Role::Router, "127.0.0.1:1".to_owned()),
            (Role::Combiner, "host.local:7070".to_owned()),
            (Role::ScatterWorker, "[::1]:65535".to_owned()),
        ];
        assert_eq!(read.expect("reads"), expected);
        let view = Membership::fixed(expected.to_vec()).view();
        assert_eq!(view.borrow().len(), 3);
        assert_eq!(view.borrow()[1].addresses, ["host.local:7070"]);
    }

    #[test]
    fn bad_static_lists_are_refused() {
        let error = |entries: &[&str]| parse_static(entries).expect_err("refused");
        for form in ["127.0.0.1:1", "combiner=host", "combiner=:1", "combiner=::1:1", "combiner=http://host:1", ""] {
            assert!(matches!(error(&[form]), MembershipError::Form(_)), "{form}");
        }
        assert!(matches!(error(&["worker=h:1"]), MembershipError::Role { .. }));
        for port in ["combiner=h:0", "combiner=h:65536", "combiner=h:"] {
            assert!(matches!(error(&[port]), MembershipError::Port(_)), "{port}");
        }
        let twice = error(&["combiner=h:1", "router=h:1"]).to_string();
        assert!(twice.contains("h:1"), "{twice}");
    }
}
