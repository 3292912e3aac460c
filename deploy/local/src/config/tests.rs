use super::*;

fn variables(pairs: &[(&str, &str)]) -> Vec<(std::ffi::OsString, std::ffi::OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

fn layers() -> Layers {
    let mut layers = Layers::new(Role::Combiner).expect("defaults");
    layers.flag("--set", "model.name", "x").expect("a setting");
    layers
}

#[test]
fn later_layers_win() {
    let file = tempfile::NamedTempFile::new().expect("room on disk");
    let text = "[router]\nseam = 1\nanchor = \"none\"\n[cache]\nbytes = \"2MiB\"\n[shutdown]\ngrace = \"7s\"\n";
    std::fs::write(file.path(), text).expect("room on disk");
    let mut layers = layers();
    layers.file(file.path()).expect("a good file");
    layers.environment(variables(&[("HYPIC__ROUTER__SEAM", "2"), ("HYPIC__CACHE__BYTES", "3MiB")])).expect("good");
    layers.flag("--seam", "router.seam", "3").expect("a setting");
    let config = layers.finish().expect("consistent");
    assert_eq!((config.router.seam, config.router.anchor), (3, Anchor::None));
    assert_eq!((config.cache.bytes, config.shutdown.grace), (ByteSize::mib(3), Duration::from_secs(7)));
}

#[test]
fn values_need_no_quotes() {
    let mut layers = layers();
    let given = [("HYPIC__MODEL__NAME", "7"), ("HYPIC__CLUSTER__ETCD__ENDPOINTS", "a:1, b:2")];
    layers.environment(variables(&given)).expect("good");
    let config = layers.finish().expect("consistent");
    assert_eq!(config.model.name.as_deref(), Some("7"));
    assert_eq!(config.cluster.etcd.endpoints, ["a:1", "b:2"]);
}

#[test]
fn what_is_unknown_is_refused_by_name() {
    for name in ["HYPIC__ROUTER__SEEM", "HYPIC__ROUTE__SEAM", "HYPIC__SEAM", "HYPIC__", "HYPIC__ROUTER__SEAM__X"] {
        let error = layers().environment(variables(&[(name, "1")])).expect_err(name).to_string();
        assert!(error.contains(name), "{error}");
    }
    let error = layers().environment(variables(&[("HYPIC__ROUTER__SEAM", "-1")])).expect_err("negative").to_string();
    assert!(error.contains("HYPIC__ROUTER__SEAM") && error.contains("-1"), "{error}");
    let error = layers().flag("--set router.seem=1", "router.seem", "1").expect_err("unknown").to_string();
    assert!(error.contains("--set router.seem=1") && error.contains("`seem`"), "{error}");
    let error = layers().flag("--dtype fp8", "model.dtype", "fp8").expect_err("unknown").to_string();
    assert!(error.contains("fp8") && error.contains("use auto, f32 or bf16"), "{error}");
    let file = tempfile::NamedTempFile::new().expect("room on disk");
    std::fs::write(file.path(), "[router]\nseem = 1\n").expect("room on disk");
    let error = format!("{:#}", layers().file(file.path()).expect_err("unknown"));
    assert!(error.contains("seem") && error.contains(file.path().to_str().expect("UTF-8")), "{error}");
}

#[test]
fn variables_of_services_mean_nothing() {
    let mut layers = layers();
    let given = [("HYPIC_ROUTER_PORT", "tcp://10.0.0.1:80"), ("HYPIC_ROUTER__SEAM", "x"), ("PATH", "/")];
    layers.environment(variables(&given)).expect("nothing of ours");
    assert_eq!(layers.finish().expect("consistent").router.seam, 8);
}

#[test]
fn tls_files_may_come_one_by_one() {
    let mut layers = layers();
    for (key, value) in [("tls.files.ca", "a"), ("tls.files.cert", "b"), ("tls.files.key", "c")] {
        layers.flag("--set", key, value).expect("a setting");
    }
    assert_eq!(layers.finish().expect("all three").tls.files, Some(TlsConfig::new("a", "b", "c")));
    let mut partial = Layers::new(Role::Combiner).expect("defaults");
    partial.flag("--set", "tls.files.ca", "a").expect("a setting");
    assert!(format!("{:#}", partial.finish().expect_err("two are missing")).contains("cert"));
}

#[test]
fn contradictions_are_refused() {
    let refused = |role, flags: &[(&str, &str)]| {
        let mut layers = Layers::new(role).expect("defaults");
        for (key, value) in flags {
            layers.flag("--set", key, value).expect("a setting");
        }
        layers.finish().expect_err("a contradiction").to_string()
    };
    let both = [("cluster.members", "combiner=a:1"), ("cluster.etcd.endpoints", "b:2")];
    assert!(refused(Role::Router, &both).contains("cluster.members"));
    assert!(refused(Role::Router, &[]).contains("--members"));
    assert!(refused(Role::Combiner, &[("cluster.members", "x=a:1")]).contains("x=a:1"));
    assert!(refused(Role::Combiner, &[("model.fingerprint", "ab")]).contains("64 hex digits"));
    assert!(refused(Role::ScatterWorker, &[("worker.concurrent", "0")]).contains("worker.concurrent"));
}

#[test]
fn what_roles_do_about_load_and_failures_is_set_here() {
    let mut layers = layers();
    let given = [
        ("HYPIC__ROUTER__FAULTS__FAILOVER_WAIT", "750ms"),
        ("HYPIC__ROUTER__COSTS__BYTES_PER_SECOND", "5000"),
        ("HYPIC__ROUTER__REPLICATE__COPIES", "5"),
        ("HYPIC__FRONT__MAX_DURATION", "2m"),
        ("HYPIC__TRANSFER__CHUNK", "2MiB"),
        ("HYPIC__TRANSFER__OPEN_WAIT", "3s"),
    ];
    layers.environment(variables(&given)).expect("good");
    let config = layers.finish().expect("consistent");
    let router = config.router.config();
    assert_eq!(router.faults.failover_wait, Duration::from_millis(750));
    assert_eq!((router.costs.bytes_per_second, router.replicate.copies), (5000, 5));
    assert_eq!(config.front.max_duration, Duration::from_secs(120));
    let grpc = config.transfer.grpc();
    assert_eq!((grpc.chunk_bytes, grpc.open_wait), (2 << 20, Duration::from_secs(3)));

    let defaults = Config::default();
    assert_eq!(defaults.transfer.grpc(), hypic_transport::grpc::GrpcConfig::default());
    assert_eq!(format!("{:?}", defaults.router.config()), format!("{:?}", RouterConfig::default()));
    for (key, value) in [
        ("router.faults.attempts", "0"),
        ("router.faults.late_factor", "-1.0"),
        ("router.boundary_share", "1.5"),
        ("transfer.chunk", "0B"),
        ("transfer.chunk", "1GiB"),
    ] {
        let mut layers = self::layers();
        layers.flag("--set", key, value).expect("a setting");
        let error = layers.finish().expect_err(key).to_string();
        assert!(error.contains(key), "{error}");
    }
    self::layers().flag("--set", "router.faults.failover_wait", "5").expect_err("no unit");
}

fn finish(role: Role, settings: &[(&str, &str)]) -> Result<Config> {
    let mut layers = Layers::new(role).expect("defaults");
    for (key, value) in settings {
        layers.flag("--set", key, value).expect("a setting");
    }
    layers.finish()
}

#[test]
fn credentials_go_to_this_machine_or_somebody_says_so() {
    let to = |endpoint| {
        [
            ("cluster.etcd.endpoints", endpoint),
            ("cluster.etcd.credentials.user", "me"),
            ("cluster.etcd.credentials.password", "hush"),
        ]
    };
    for role in [Role::Router, Role::ScatterWorker, Role::Combiner] {
        let error = finish(role, &to("10.0.0.1:2379")).expect_err("in plain text").to_string();
        let want = "cluster.etcd.credentials are sent unencrypted to 10.0.0.1:2379: use a loopback endpoint, or \
                    --insecure";
        assert_eq!(error, want);
        finish(role, &to("127.0.0.1:2379")).expect("stays here");
        let allowed: Vec<_> = to("10.0.0.1:2379").into_iter().chain([("tls.insecure", "true")]).collect();
        finish(role, &allowed).expect("allowed");
        finish(role, &to("10.0.0.1:2379")[..1]).expect("nothing to hide");
    }
}

#[test]
fn connections_that_cannot_work_are_refused() {
    for (key, value, range) in [
        ("cluster.connection.max_frame", "16383", "16384 to 16777215"),
        ("cluster.connection.max_frame", "16777216", "16384 to 16777215"),
        ("cluster.connection.stream_window", "2147483648", "1 to 2147483647"),
        ("cluster.connection.connection_window", "0", "1 to 2147483647"),
        ("cluster.connection.max_streams", "0", "1 to"),
        ("cluster.connection.ping_interval", "0s", "at least 1ms"),
        ("cluster.peers.keep_alive", "0s", "at least 1ms"),
        ("cluster.peers.reconnect.initial", "0s", "at least 1ms"),
        ("cluster.etcd.request_timeout", "0s", "at least 1ms"),
        ("front.stream_window", "2147483648", "1 to 2147483647"),
        ("front.connection_window", "4294967295", "1 to 2147483647"),
        ("front.read_timeout", "0s", "at least 1ms"),
        ("front.stream_keep_alive", "0s", "at least 1ms"),
        ("front.body_limit", "0", "at least 1"),
    ] {
        let error = finish(Role::Combiner, &[(key, value)]).expect_err(key).to_string();
        assert!(error.starts_with(&format!("{key} is {value}: ")) || value == "0s", "{error}");
        assert!(error.contains(key) && error.contains(range), "{error}");
    }
    for (key, value) in [
        ("cluster.connection.max_frame", "16384"),
        ("cluster.connection.max_frame", "16777215"),
        ("front.stream_window", "2147483647"),
        ("front.max_duration", "0s"),
    ] {
        finish(Role::Combiner, &[(key, value)]).expect(key);
    }
}

#[test]
fn what_is_printed_can_be_read_again() {
    for role in [Role::Router, Role::ScatterWorker, Role::Combiner] {
        let text = toml::to_string(&Config::of(role)).expect("writes");
        let again: Config = toml::from_str(&text).expect("reads");
        assert_eq!(toml::to_string(&again).expect("writes"), text);
    }
}
