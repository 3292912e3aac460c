//! Ranges of the settings of connections: HTTP/2 takes no other windows and frames, and a time of zero means that
//! nothing is ever in time. A value out of range is refused with its key and the range; otherwise every single
//! connection would fail by it.

use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Result, bail};

use super::Config;

/// Flow-control windows of HTTP/2, in bytes.
const WINDOW: RangeInclusive<u32> = 1..=(1 << 31) - 1;
/// Frames of HTTP/2, in bytes.
const FRAME: RangeInclusive<u32> = 1 << 14..=(1 << 24) - 1;

/// Check what concerns connections, inside and outside.
pub(super) fn check(config: &Config) -> Result<()> {
    let (cluster, front) = (&config.cluster, &config.front);
    let (connection, peers, etcd) = (&cluster.connection, &cluster.peers, &cluster.etcd);
    for (key, value, range) in [
        ("cluster.connection.max_frame", connection.max_frame, FRAME),
        ("cluster.connection.stream_window", connection.stream_window, WINDOW),
        ("cluster.connection.connection_window", connection.connection_window, WINDOW),
        ("cluster.connection.max_streams", connection.max_streams, 1..=u32::MAX),
        ("front.stream_window", front.stream_window, WINDOW),
        ("front.connection_window", front.connection_window, WINDOW),
        ("front.max_streams", front.max_streams, 1..=u32::MAX),
        ("front.header_limit", front.header_limit, 1..=u32::MAX),
    ] {
        if !range.contains(&value) {
            bail!("{key} is {value}: it must be {} to {}", range.start(), range.end());
        }
    }
    if front.body_limit == 0 {
        bail!("front.body_limit is 0: it must be at least 1");
    }
    for (key, time) in [
        ("cluster.connection.connect_timeout", connection.connect_timeout),
        ("cluster.connection.ping_interval", connection.ping_interval),
        ("cluster.connection.ping_timeout", connection.ping_timeout),
        ("cluster.peers.keep_alive", peers.keep_alive),
        ("cluster.peers.reconnect.initial", peers.reconnect.initial),
        ("cluster.peers.reconnect.max", peers.reconnect.max),
        ("cluster.etcd.request_timeout", etcd.request_timeout),
        ("cluster.etcd.reconnect.initial", etcd.reconnect.initial),
        ("cluster.etcd.reconnect.max", etcd.reconnect.max),
        ("front.read_timeout", front.read_timeout),
        ("front.stream_keep_alive", front.stream_keep_alive),
        ("front.ping_interval", front.ping_interval),
        ("front.ping_timeout", front.ping_timeout),
    ] {
        if time < Duration::from_millis(1) {
            bail!("{key} is {time:?}: it must be at least 1ms");
        }
    }
    Ok(())
}
