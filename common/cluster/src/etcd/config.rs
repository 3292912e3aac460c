//! How etcd is reached, and as whom. Settings that cannot work are refused by name; whether credentials may go where
//! they would go is for the program to decide.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::backoff::BackoffConfig;
use crate::membership::MembershipError;

/// How etcd is reached and used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EtcdConfig {
    /// HOST:PORT of its members.
    pub endpoints: Vec<String>,
    /// Where the records are; ends with `/`.
    pub prefix: String,
    /// A member that says nothing for so long is taken off the list; whole seconds.
    #[serde(with = "humantime_serde")]
    pub lease_ttl: Duration,
    /// Time for etcd to answer a request.
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    /// Waits between attempts to reach it.
    pub reconnect: BackoffConfig,
    /// Who to be there; `None` if it asks for nobody. Sent unencrypted: see [`exposed_to`](Self::exposed_to).
    pub credentials: Option<EtcdCredentials>,
}

impl Default for EtcdConfig {
    fn default() -> Self {
        EtcdConfig {
            endpoints: Vec::new(),
            prefix: "/hypic/members/".to_owned(),
            lease_ttl: Duration::from_secs(5),
            request_timeout: Duration::from_secs(2),
            reconnect: BackoffConfig::default(),
            credentials: None,
        }
    }
}

/// A user of etcd. The password is neither printed nor written out.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdCredentials {
    /// Its name.
    pub user: String,
    /// Its password.
    #[serde(skip_serializing)]
    pub password: String,
}

impl fmt::Debug for EtcdCredentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdCredentials").field("user", &self.user).finish_non_exhaustive()
    }
}

impl EtcdConfig {
    /// The first endpoint beyond loopback that is told the credentials, which are not encrypted on the way; `None` if
    /// there are no credentials, or they stay on this machine.
    pub fn exposed_to(&self) -> Option<&str> {
        self.credentials.as_ref()?;
        self.endpoints.iter().map(String::as_str).find(|endpoint| !is_loopback(endpoint))
    }

    pub(super) fn check(&self) -> Result<(), MembershipError> {
        let refuse = |text: String| Err(MembershipError::Etcd(text));
        if self.endpoints.is_empty() {
            return refuse("no endpoints: name at least one HOST:PORT".to_owned());
        }
        for endpoint in &self.endpoints {
            let port = endpoint.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
            if port.is_none_or(|port| port.parse::<u16>().is_err()) || endpoint.contains('/') {
                return refuse(format!("endpoint `{endpoint}` is not HOST:PORT"));
            }
        }
        if self.prefix.len() < 2 || !self.prefix.ends_with('/') {
            return refuse(format!("prefix `{}` must name something and end with `/`", self.prefix));
        }
        if self.lease_ttl < Duration::from_secs(1) || self.lease_ttl.subsec_nanos() != 0 {
            return refuse(format!("lease_ttl {:?} must be whole seconds, at least 1s", self.lease_ttl));
        }
        Ok(())
    }
}

/// Whether HOST:PORT is surely on this machine: other names than `localhost` may lead anywhere.
fn is_loopback(endpoint: &str) -> bool {
    match endpoint.parse::<SocketAddr>() {
        Ok(address) => address.ip().to_canonical().is_loopback(),
        Err(_) => endpoint.rsplit_once(':').is_some_and(|(host, _)| host.eq_ignore_ascii_case("localhost")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configurations_that_cannot_work_are_refused() {
        let good = EtcdConfig { endpoints: vec!["127.0.0.1:2379".into()], ..EtcdConfig::default() };
        good.check().expect("works");
        let refused = |change: fn(&mut EtcdConfig)| {
            let mut config = good.clone();
            change(&mut config);
            config.check().expect_err("refused").to_string()
        };
        assert!(refused(|c| c.endpoints.clear()).contains("endpoints"));
        assert!(refused(|c| c.endpoints[0] = "http://h:1".into()).contains("http://h:1"));
        assert!(refused(|c| c.endpoints[0] = "h".into()).contains("`h`"));
        assert!(refused(|c| c.prefix = "/members".into()).contains("/members"));
        assert!(refused(|c| c.prefix = "/".into()).contains("prefix"));
        assert!(refused(|c| c.lease_ttl = Duration::from_millis(500)).contains("lease_ttl"));
        let secret = EtcdCredentials { user: "me".into(), password: "hush".into() };
        assert!(!format!("{secret:?}").contains("hush"));
    }

    #[test]
    fn credentials_beyond_loopback_are_noticed() {
        let with = |endpoints: &[&str], credentials: Option<EtcdCredentials>| EtcdConfig {
            endpoints: endpoints.iter().map(|&endpoint| endpoint.to_owned()).collect(),
            credentials,
            ..EtcdConfig::default()
        };
        let me = || Some(EtcdCredentials { user: "me".into(), password: "hush".into() });
        let here = ["127.0.0.1:1", "[::1]:1", "localhost:1", "127.9.9.9:1", "[::ffff:127.0.0.1]:1"];
        assert_eq!(with(&here, me()).exposed_to(), None);
        for there in ["10.0.0.1:1", "etcd.local:1", "localhost.local:1", "[::]:1", "0.0.0.0:1", "[2001:db8::1]:1"] {
            assert_eq!(with(&[here[0], there], me()).exposed_to(), Some(there));
            assert_eq!(with(&[here[0], there], None).exposed_to(), None);
        }
    }
}
