//! The code generated from the protos, and the typed cause of a failed call.

use prost::Message;
use tonic::Status;

tonic::include_proto!("percolator.v1");

/// `google.rpc.Status`, the standard content of the trailer `grpc-status-details-bin`.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

/// The typed cause of a failed call; none if the call never reached a server of the cluster.
pub fn detail(status: &Status) -> Option<ErrorDetail> {
    let told = RpcStatus::decode(status.details()).ok()?;
    let packed = told.details.first()?;
    ErrorDetail::decode(packed.value.as_slice()).ok()
}

/// The bytes of an integer as defined in docs/formats.md: 8, two's complement, big-endian.
pub fn integer(value: i64) -> Vec<u8> {
    value.to_be_bytes().to_vec()
}

pub fn as_integer(bytes: &[u8]) -> Result<i64, Status> {
    let bytes = bytes
        .try_into()
        .map_err(|_| Status::data_loss(format!("{} bytes are not an integer", bytes.len())))?;
    Ok(i64::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_those_of_the_formats() {
        assert_eq!(
            integer(-2),
            [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]
        );
        assert_eq!(as_integer(&integer(i64::MIN)).unwrap(), i64::MIN);
        assert!(as_integer(b"123").is_err());
    }

    #[test]
    fn a_failure_without_details_has_no_cause() {
        assert!(detail(&Status::unavailable("no answer")).is_none());
    }
}
