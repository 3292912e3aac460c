//! Mutual TLS with certificates made on the spot.

mod support;

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use hypic_cluster::{ConnectionConfig, Dialer, Membership, Role, Tls, TlsConfig, TlsError};
use hypic_test_support::Authority;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use support::{Member, peers, until};
use tempfile::TempDir;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Have files for `name` made in `folder`, to be looked at often.
fn issue(authority: &Authority, folder: &TempDir, name: &str) -> TlsConfig {
    let files = authority.issue(folder.path(), name);
    TlsConfig { poll: Duration::from_millis(50), ..TlsConfig::new(files.ca, files.cert, files.key) }
}

async fn reaches(member: &Member, tls: Option<Tls>) -> bool {
    let Ok(channel) = Dialer::new(ConnectionConfig::default(), tls).connect(&member.address.to_string()).await else {
        return false;
    };
    let hello = hypic_proto::v1::HelloRequest { protocol_min: 1, protocol_max: 1, ..Default::default() };
    hypic_proto::v1::node_client::NodeClient::new(channel).hello(hello).await.is_ok()
}

#[tokio::test]
async fn members_of_one_authority_reach_each_other_and_nobody_else() {
    let folders = [(); 4].map(|()| tempfile::tempdir().expect("a folder"));
    let (authority, stranger) = (Authority::new(), Authority::new());
    let load = |config| Tls::load(config).expect("loads");
    let server = load(issue(&authority, &folders[0], "hypic"));
    let client = load(issue(&authority, &folders[1], "hypic"));
    let member = Member::start("127.0.0.1:0", Some(server.clone()), |_| {}).await;
    assert!(reaches(&member, Some(client.clone())).await);
    assert!(!reaches(&member, None).await, "plain text");
    assert!(!reaches(&member, Some(load(issue(&stranger, &folders[2], "hypic")))).await, "another authority");
    // Trusts the member but shows a certificate of another authority.
    let mixed = issue(&stranger, &folders[2], "hypic");
    fs::copy(folders[1].path().join("ca.pem"), &mixed.ca).expect("copies");
    assert!(!reaches(&member, Some(load(mixed))).await, "a client without a certificate of the authority");
    let misnamed = load(issue(&authority, &folders[3], "elsewhere"));
    let imposter = Member::start("127.0.0.1:0", Some(misnamed), |_| {}).await;
    assert!(!reaches(&imposter, Some(client.clone())).await, "another name");
    let dialer = Dialer::new(ConnectionConfig::default(), Some(client));
    let peers = peers(dialer, Membership::fixed(vec![(Role::Combiner, member.address.to_string())]).view());
    until("the member is up over tls", || peers.find(member.id().as_str()).is_some()).await;
}

#[tokio::test]
async fn a_caller_that_says_nothing_behind_its_handshake_is_hung_up_on() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    let authority = Authority::new();
    let server = Tls::load(issue(&authority, &folders[0], "hypic")).expect("loads");
    let member = Member::start("127.0.0.1:0", Some(server), |_| {}).await;
    let files = issue(&authority, &folders[1], "hypic");
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&files.ca).expect("a certificate")).expect("a root");
    let cert = CertificateDer::from_pem_file(&files.cert).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(&files.key).expect("a key");
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![cert], key)
        .expect("a certificate and its key");
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let stream = TcpStream::connect(member.address).await.expect("it listens");
    let mut stream = connector.connect(ServerName::try_from("hypic").expect("a name"), stream).await.expect("TLS");
    let limit = 5 * ConnectionConfig::default().connect_timeout;
    let mut heard = Vec::new();
    // An end without a farewell is an error.
    let _ = timeout(limit, stream.read_to_end(&mut heard)).await.expect("hangs up");
    assert!(heard.is_empty(), "it speaks though it was not spoken to: {heard:?}");
}

#[tokio::test]
async fn changed_files_are_used_and_bad_ones_are_not() {
    let (here, there) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let (old, new) = (Authority::new(), Authority::new());
    let config = issue(&old, &here, "hypic");
    let member = Member::start("127.0.0.1:0", Some(Tls::load(config.clone()).expect("loads")), |_| {}).await;
    let client = Tls::load(issue(&old, &there, "hypic")).expect("loads");
    assert!(reaches(&member, Some(client.clone())).await);
    fs::write(&config.cert, "no certificate").expect("writes");
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(reaches(&member, Some(client.clone())).await, "the old files stay in use");
    issue(&new, &here, "hypic");
    let other = tempfile::tempdir().expect("a folder");
    let renewed = Tls::load(issue(&new, &other, "hypic")).expect("loads");
    let mut reached = false;
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        reached = reaches(&member, Some(renewed.clone())).await;
        if reached {
            break;
        }
    }
    assert!(reached, "the new files are used");
    assert!(!reaches(&member, Some(client)).await, "the old authority is out");
}

#[tokio::test]
async fn bad_files_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = issue(&Authority::new(), &folder, "hypic");
    let error = |config: TlsConfig| Tls::load(config).expect_err("refused");
    let missing = error(TlsConfig { key: folder.path().join("absent.pem"), ..good.clone() });
    assert!(matches!(missing, TlsError::Read { .. }) && missing.to_string().contains("absent.pem"));
    assert!(matches!(error(TlsConfig { cert: good.key.clone(), ..good.clone() }), TlsError::Pem { .. }));
    assert!(matches!(error(TlsConfig { server_name: "10.0.0.1".into(), ..good.clone() }), TlsError::ServerName(_)));
    let other = tempfile::tempdir().expect("a folder");
    let foreign = issue(&Authority::new(), &other, "hypic");
    assert!(matches!(error(TlsConfig { key: foreign.key, ..good }), TlsError::Unusable { .. }));
}
