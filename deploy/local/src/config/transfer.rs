//! Settings of transfers between processes, with their units. Their meaning and defaults are the transport's.

use std::time::Duration;

use anyhow::{Result, bail};
use bytesize::ByteSize;
use hypic_transport::grpc::GrpcConfig;
use serde::{Deserialize, Serialize};

/// How entries travel from workers to combiners.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferSection {
    /// Bytes of an encoded part that travel in one message.
    pub chunk: ByteSize,
    /// Messages that wait to be sent at most, per transfer.
    pub chunks_ahead: usize,
    /// Bytes of K and V that are encoded at a time.
    pub range: ByteSize,
    /// Bytes of K and V of unfinished layers that wait to be sent at most, per transfer.
    pub ahead: ByteSize,
    /// Time in which the combiner must have opened a transfer that begins to arrive.
    #[serde(with = "humantime_serde")]
    pub open_wait: Duration,
    /// Time in which a combiner that the router names must have shown itself to the worker.
    #[serde(with = "humantime_serde")]
    pub member_wait: Duration,
    /// Encoded bytes of one layer at most.
    pub part_limit: ByteSize,
}

impl Default for TransferSection {
    fn default() -> Self {
        let grpc = GrpcConfig::default();
        TransferSection {
            chunk: ByteSize::b(grpc.chunk_bytes as u64),
            chunks_ahead: grpc.chunks_ahead,
            range: ByteSize::b(grpc.range_bytes as u64),
            ahead: ByteSize::b(grpc.ahead_bytes as u64),
            open_wait: grpc.open_wait,
            member_wait: grpc.member_wait,
            part_limit: ByteSize::b(grpc.part_limit),
        }
    }
}

impl TransferSection {
    /// What the transport takes. Call only after [`check`](Self::check).
    pub fn grpc(&self) -> GrpcConfig {
        let bytes = |size: ByteSize| usize::try_from(size.as_u64()).unwrap_or(usize::MAX);
        GrpcConfig {
            chunk_bytes: bytes(self.chunk),
            chunks_ahead: self.chunks_ahead,
            range_bytes: bytes(self.range),
            ahead_bytes: bytes(self.ahead),
            open_wait: self.open_wait,
            member_wait: self.member_wait,
            part_limit: self.part_limit.as_u64(),
        }
    }

    /// What cannot work.
    ///
    /// # Errors
    /// If a size is zero, or a message would be too large for its receiver.
    pub fn check(&self) -> Result<()> {
        for (name, value) in [
            ("transfer.chunk", self.chunk.as_u64()),
            ("transfer.chunks_ahead", self.chunks_ahead as u64),
            ("transfer.range", self.range.as_u64()),
            ("transfer.part_limit", self.part_limit.as_u64()),
        ] {
            if value == 0 {
                bail!("{name} is 0: it must be at least 1");
            }
        }
        let most = hypic_transport::grpc::MESSAGE_LIMIT as u64 / 2;
        if self.chunk.as_u64() > most {
            bail!("transfer.chunk is {}: messages have {} at most", self.chunk, ByteSize::b(most));
        }
        Ok(())
    }
}
