//! Members that come, load, leave and are found: etcd that is away, forgets or asks for users; workers that share a
//! port; a worker that still loads its model; a way between members that nobody without a certificate gets in by.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use hypic_process_tests::{
    Member, Options, Request, Roles, Signal, alive, ask, demo_model, members, open, status, until,
};
use hypic_test_support::{Authority, Etcd};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep, timeout};

const SETTLE: Duration = Duration::from_secs(5);
const SOON: Duration = Duration::from_secs(20);

/// Members that are found through `etcd`.
fn found_through(etcd: &Etcd) -> Options {
    Options { endpoint: Some(etcd.endpoint().to_string()), ..Options::default() }
}

/// The same, and their leases lapse soon.
fn with_short_leases(etcd: &Etcd) -> Options {
    Options { arguments: set("cluster.etcd.lease_ttl=2s").to_vec(), ..found_through(etcd) }
}

fn set(setting: &str) -> [String; 2] {
    ["--set".to_string(), setting.to_string()]
}

async fn right(base: &str, when: &str) {
    let answer = ask(base, &Request::first()).await.unwrap_or_else(|why| panic!("{when}: {why:?}"));
    assert!(answer.text.contains("Felton"), "{when}: {answer:?}");
}

/// A request that nobody has seen yet is computed by workers.
async fn cold(base: &str, seed: u64, when: &str) {
    let request = Request::random(seed, &[60, 60], 4);
    let answer = ask(base, &request).await.unwrap_or_else(|why| panic!("{when}: {why:?}"));
    assert!(answer.sources().iter().all(|source| source == "computed"), "{when}: {}", answer.hypic);
}

#[tokio::test]
async fn etcd_away_for_half_a_minute_costs_nothing() {
    let etcd = Etcd::start().await;
    let roles = Roles::start(with_short_leases(&etcd), &[]).await;
    // Two workers, a combiner, a router.
    let before = etcd.wait_for_members(4).await;
    let stream = open(&roles.base(), &Request::random(600, &[100], 2000)).await.expect("a stream");
    etcd.signal(Signal::STOP);
    let began = Instant::now();
    let mut seed = 601;
    while began.elapsed() < Duration::from_secs(30) {
        seed += 1;
        cold(&roles.base(), seed, "etcd is stopped").await;
        right(&roles.base(), "etcd is stopped").await;
        sleep(Duration::from_secs(2)).await;
    }
    stream.rest().await.expect("an answer that was under way");
    etcd.signal(Signal::CONT);
    // All leases have lapsed: everybody is there again, under its old id and a new lease.
    let back = async || {
        let now = etcd.members().await?;
        let known = |id: &String| before.iter().any(|(known, _)| known == id);
        let renewed = now.iter().all(|entry| known(&entry.0) && !before.contains(entry));
        (now.len() == 4 && renewed).then_some(())
    };
    until(SOON, "all stand in etcd again", back).await;
    roles.wait_for_members(3).await;
    cold(&roles.base(), 700, "etcd is back").await;
    roles.assert_idle(SETTLE, &[]).await;
}

#[tokio::test]
async fn a_lost_lease_is_replaced_and_drops_no_work() {
    let etcd = Etcd::start().await;
    let roles = Roles::start(found_through(&etcd), &[]).await;
    let request = Request::random(710, &[100], 2500);
    let mut stream = open(&roles.base(), &request).await.expect("a stream");
    stream.reach(50).await.expect("text");
    let before = etcd.wait_for_members(4).await;
    for (_, lease) in &before {
        etcd.revoke(*lease).await;
    }
    let answer = stream.rest().await.expect("an answer that was under way");
    let back = async || {
        let now = etcd.members().await?;
        (now.len() == before.len() && now.iter().all(|entry| !before.contains(entry))).then_some(now)
    };
    let now = until(SOON, "all stand in etcd again", back).await;
    assert!(now.iter().all(|(id, _)| before.iter().any(|(known, _)| known == id)), "{before:?} {now:?}");
    let again = ask(&roles.base(), &request).await.expect("an answer");
    assert_eq!(again.text, answer.text);
    assert!(roles.members().all(|member| alive(member.pid)));
    roles.assert_idle(SETTLE, &[]).await;
}

#[tokio::test]
async fn what_a_stopped_router_missed_and_etcd_forgot_is_seen_when_it_goes_on() {
    let etcd = Etcd::start().await;
    let mut roles = Roles::start(with_short_leases(&etcd), &[]).await;
    right(&roles.base(), "before").await;
    let router = roles.routers[0].clone();
    roles.signal(&router, Signal::STOP);
    // While it is away one worker dies, its record lapses, and all of that is compacted away.
    let dead = roles.workers[0].clone();
    roles.signal(&dead, Signal::KILL);
    let gone = async || (!etcd.members().await?.iter().any(|(id, _)| *id == dead.id)).then_some(());
    until(SOON, "the record of a dead worker lapses", gone).await;
    etcd.write_and_compact(50).await;
    roles.signal(&router, Signal::CONT);
    roles.wait_for_members(2).await;
    let seen = members(&router.metrics).await.expect("an answer");
    assert!(!seen.iter().any(|member| member["id"] == dead.id.as_str()), "{seen:?}");
    // And a new one is found.
    roles.replace(&dead).await;
    cold(&roles.base(), 720, "after").await;
    right(&roles.base(), "after").await;
    roles.assert_idle(SETTLE, &[]).await;
}

#[tokio::test]
async fn an_etcd_that_asks_who_is_there_is_told() {
    let mut etcd = Etcd::start().await;
    etcd.protect("hypic", "a password").await;
    let name = |key: &str| format!("HYPIC__CLUSTER__ETCD__CREDENTIALS__{key}");
    let with = |password: &str| vec![(name("USER"), "hypic".to_string()), (name("PASSWORD"), password.to_string())];
    let roles = Roles::start(Options { environment: with("a password"), ..found_through(&etcd) }, &[]).await;
    right(&roles.base(), "with credentials").await;
    let inside = etcd.wait_for_members(4).await;
    assert!(!roles.log().contains("a password"), "in a log");
    for environment in [with("another"), Vec::new()] {
        let stranger = Options { workers: 1, combiners: 0, routers: 0, environment, ..found_through(&etcd) };
        let stranger = Roles::begin(stranger, &[]).await;
        let member = stranger.workers[0].clone();
        sleep(Duration::from_secs(1)).await;
        assert_eq!(status(&member.metrics, "/health").await, Some(200), "it goes on trying");
        assert_eq!(status(&member.metrics, "/ready").await, Some(503), "and is not ready");
        let now = etcd.wait_for_members(4).await;
        assert!(now.iter().all(|(id, _)| inside.iter().any(|(known, _)| known == id)), "it does not get in: {now:?}");
    }
    roles.assert_idle(SETTLE, &[]).await;
}

#[tokio::test]
async fn workers_of_one_port_at_two_addresses_are_two() {
    let hosts = vec!["127.0.0.2".to_string(), "127.0.0.3".to_string()];
    let roles = Roles::start(Options { hosts, ..Options::default() }, &[]).await;
    let [first, second] = [0, 1].map(|i| roles.workers[i].clone());
    assert_eq!(first.address.rsplit_once(':').expect("a port").1, second.address.rsplit_once(':').expect("a port").1);
    let answer = ask(&roles.base(), &Request::first()).await.expect("an answer");
    assert!(answer.text.contains("Felton"), "{answer:?}");
    let workers = answer.workers();
    assert!([&first, &second].iter().all(|worker| workers.contains(&worker.id)), "{}", answer.hypic);
    // One of them is lost, the other one is not.
    roles.signal(&first, Signal::KILL);
    roles.wait_for_members(2).await;
    let request = Request::random(730, &[80, 80, 80], 6);
    let answer = ask(&roles.base(), &request).await.expect("an answer");
    assert!(answer.workers().iter().all(|id| *id == second.id), "{}", answer.hypic);
    roles.assert_idle(SETTLE, &[]).await;
}

/// A copy of the demo model whose `config.json` is a pipe: whoever loads it waits until it is written to.
fn model_that_loads_slowly(folder: &Path) -> std::path::PathBuf {
    let to = folder.join("slow-model");
    std::fs::create_dir(&to).expect("room for a model");
    for file in ["generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo_model().join(file), to.join(file)).expect("room for a model");
    }
    let made = Command::new("mkfifo").arg(to.join("config.json")).status().expect("mkfifo");
    assert!(made.success(), "{made}");
    to
}

#[tokio::test]
async fn a_worker_that_loads_is_listed_and_used_once_it_has_loaded() {
    let folder = tempfile::tempdir().expect("room on disk");
    let slow = model_that_loads_slowly(folder.path());
    // On a machine that stalls no connection breaks for that alone.
    let patient = ["cluster.peers.keep_alive=30s", "cluster.connection.ping_timeout=30s"];
    let options =
        Options { arguments: patient.iter().flat_map(|setting| set(setting)).collect(), ..Options::default() };
    let roles = Roles::begin(options, std::slice::from_ref(&slow)).await;
    roles.wait_for_members(2).await;
    let (loading, other) = (roles.workers[0].clone(), roles.workers[1].clone());
    let seen = async |member: &Member| {
        let all = members(&roles.routers[0].metrics).await.expect("an answer");
        all.into_iter().find(|seen| seen["id"] == member.id.as_str())
    };
    let listed = until(SOON, "it is listed", async || seen(&loading).await).await;
    assert_eq!((&listed["state"], &listed["usable"]), (&"loading".into(), &false.into()), "{listed}");
    assert_eq!(status(&loading.metrics, "/health").await, Some(200));
    assert_eq!(status(&loading.metrics, "/ready").await, Some(503));
    let answer = ask(&roles.base(), &Request::first()).await.expect("an answer");
    assert!(!answer.workers().contains(&loading.id) && answer.workers().contains(&other.id), "{}", answer.hypic);

    let config = std::fs::read(demo_model().join("config.json")).expect("the demo model");
    std::thread::spawn(move || {
        let mut pipe = std::fs::OpenOptions::new().write(true).open(slow.join("config.json")).expect("a reader");
        pipe.write_all(&config).expect("it reads");
    });
    roles.wait_for_members(3).await;
    let ready = async || (status(&loading.metrics, "/ready").await == Some(200)).then_some(());
    until(SOON, "it is ready", ready).await;
    let log = roles.log();
    let of_it = |what: &str| log.lines().filter(|line| line.contains(what) && line.contains(&loading.id)).count();
    assert_eq!((of_it("member is up"), of_it("member is down")), (1, 0), "no connection was made anew");
    let request = Request::random(740, &[90, 90, 90, 90], 6);
    let answer = ask(&roles.base(), &request).await.expect("an answer");
    assert!(answer.workers().contains(&loading.id), "{}", answer.hypic);
    roles.assert_idle(SETTLE, &[]).await;
}

/// Settings of a member whose files are in `folder`, made here.
fn with_certificate(authority: &Authority, folder: &Path) -> Vec<String> {
    let files = authority.issue(folder, "hypic");
    let files = [("ca", files.ca), ("cert", files.cert), ("key", files.key)];
    files.iter().flat_map(|(name, path)| set(&format!("tls.files.{name}={}", path.display()))).collect()
}

/// Whether whoever listens at the other end of `stream` speaks HTTP/2 with us.
async fn speaks(stream: &mut (impl AsyncReadExt + AsyncWriteExt + Unpin)) -> bool {
    // The preface and empty settings: a server answers with its own settings, frame type 4.
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    if stream.write_all(preface).await.is_err() || stream.flush().await.is_err() {
        return false;
    }
    let mut header = [0; 9];
    matches!(timeout(SETTLE, stream.read_exact(&mut header)).await, Ok(Ok(_)) if header[3] == 4)
}

#[tokio::test]
async fn without_a_certificate_nobody_gets_in() {
    let folders = [(); 2].map(|()| tempfile::tempdir().expect("room on disk"));
    let (authority, stranger) = (Authority::new(), Authority::new());
    let options = Options { arguments: with_certificate(&authority, folders[0].path()), ..Options::default() };
    let roles = Roles::start(options, &[]).await;
    right(&roles.base(), "over mutual TLS").await;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.pem().as_bytes()).expect("a certificate")).expect("a root");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    for member in roles.workers.iter().chain(&roles.combiners) {
        let connect = async || TcpStream::connect(&member.address).await.expect("it listens");
        assert!(!speaks(&mut connect().await).await, "{} in plain text", member.role);
        let name = ServerName::try_from("hypic").expect("a name");
        // With TLS 1.3 the refusal may come only after the handshake.
        let entered = match connector.connect(name, connect().await).await {
            Ok(mut stream) => speaks(&mut stream).await,
            Err(_) => false,
        };
        assert!(!entered, "{} without a certificate", member.role);
    }
    // A whole worker of another authority, which knows where the combiner is, is of no use to anybody.
    let listed = vec!["--members".to_string(), format!("combiner={}", roles.combiners[0].address)];
    let arguments = with_certificate(&stranger, folders[1].path()).into_iter().chain(listed).collect();
    let outside = Options { workers: 1, combiners: 0, routers: 0, arguments, ..Options::default() };
    let outside = Roles::begin(outside, &[]).await;
    sleep(Duration::from_millis(500)).await;
    assert_eq!(members(&outside.workers[0].metrics).await, Some(Vec::new()));
    right(&roles.base(), "beside strangers").await;
    roles.assert_idle(SETTLE, &[]).await;
}
