//! The protocol `hypic.v1`: messages, clients and servers, generated from `hypic/v1/*.proto`,
//! which document every field. `inference.proto` is the public API, `internal.proto` what the roles
//! of a cluster say to each other.
//!
//! Nothing here checks a message: optional fields are `Option`, enums are integers, and whoever
//! receives one must refuse what it cannot use.
#![forbid(unsafe_code)]

/// Package `hypic.v1`.
pub mod v1 {
    #![allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, rustdoc::all)]
    tonic::include_proto!("hypic.v1");
}

/// The encoded `FileDescriptorSet` of the package, for gRPC reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = tonic::include_file_descriptor_set!("hypic_v1");

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[test]
    fn large_payloads_are_shared_not_copied() {
        let data = bytes::Bytes::from(vec![7u8; 1 << 16]);
        let chunk = v1::PartChunk { data, part_bytes: 1 << 16, ..Default::default() };
        let wire = bytes::Bytes::from(chunk.encode_to_vec());
        let range = wire.as_ptr_range();
        let back = v1::PartChunk::decode(wire.clone()).expect("decodes");
        assert_eq!(back, chunk);
        assert!(range.contains(&back.data.as_ptr()), "the bytes point into the received message");
    }

    #[test]
    fn unset_is_not_zero() {
        let unset = v1::Sampling::default();
        let zero = v1::Sampling { temperature: Some(0.0), seed: Some(0), ..Default::default() };
        assert!(unset.encode_to_vec().is_empty());
        let back = v1::Sampling::decode(zero.encode_to_vec().as_slice()).expect("decodes");
        assert_eq!((back.temperature, back.top_p, back.seed), (Some(0.0), None, Some(0)));
    }

    #[test]
    fn descriptors_hold_every_service() {
        let text = String::from_utf8_lossy(FILE_DESCRIPTOR_SET);
        for name in ["Inference", "Node", "Scatter", "Combine", "Directory"] {
            assert!(text.contains(name), "no service {name}");
        }
    }
}
