//! Transactions through any of several gateways.
//!
//! A gateway keeps no state, so each call may go to another one. The rule that matters is in
//! `Transaction::commit`: a commit without an answer is repeated *unchanged*, never begun again.

use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::wire::gateway_service_client::GatewayServiceClient;
use crate::wire::{
    cell_write::Kind, BeginRequest, CellWrite, CommitRequest, GetRequest, RowQuery, RowRange,
    ScanTableRequest,
};

const CALL_TIME: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(50);

/// The gateways of one cluster, and the turn at which calls begin: turn `n` is at gateway
/// `n % gateways`.
///
/// A call that fails goes on at its own next turn. If it took the common one instead, four callers
/// that wait for the same dead gateway of two would each move that on, and come back to the dead one.
pub struct Gateways {
    channels: Vec<Channel>,
    turn: AtomicUsize,
}

/// The final outcome of a commit.
#[derive(Debug)]
pub enum Outcome {
    /// All of it is visible from this timestamp on.
    Committed(u64),
    /// None of it ever will be: another transaction was first.
    Aborted(Status),
}

impl Gateways {
    /// `addresses` look like "localhost:7110"; they are dialled when needed.
    pub fn new(addresses: &[String]) -> Result<Self, tonic::transport::Error> {
        let channels = addresses
            .iter()
            .map(|address| {
                let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
                Ok(endpoint.connect_timeout(CALL_TIME).connect_lazy())
            })
            .collect::<Result<Vec<_>, tonic::transport::Error>>()?;
        Ok(Self {
            channels,
            turn: AtomicUsize::new(0),
        })
    }

    /// The turn at which a call begins: the last one known to be good.
    pub fn turn(&self) -> usize {
        self.turn.load(Ordering::Relaxed)
    }

    /// The turn after one that failed. Later calls begin there, unless another call moved on first.
    fn after(&self, failed: usize) -> usize {
        let next = failed + 1;
        let _ = self
            .turn
            .compare_exchange(failed, next, Ordering::Relaxed, Ordering::Relaxed);
        next
    }

    fn channel(&self, turn: usize) -> Channel {
        self.channels[turn % self.channels.len()].clone()
    }

    fn client(&self, turn: usize) -> GatewayServiceClient<Channel> {
        GatewayServiceClient::new(self.channel(turn))
    }

    /// A new transaction, which sees everything committed until now.
    pub async fn begin(&self) -> Result<Transaction<'_>, Status> {
        let told = self
            .anywhere(|channel| async move {
                let mut client = GatewayServiceClient::new(channel);
                client.begin(timed(BeginRequest {})).await
            })
            .await?;
        Ok(Transaction {
            gateways: self,
            start: told.start_timestamp,
            writes: Vec::new(),
        })
    }

    /// Calls one gateway after another until one answers. Only for calls that may be repeated.
    pub async fn anywhere<R, F, A>(&self, call: F) -> Result<R, Status>
    where
        F: Fn(Channel) -> A,
        A: Future<Output = Result<Response<R>, Status>>,
    {
        let until = Instant::now() + PATIENCE;
        let mut turn = self.turn();
        loop {
            match call(self.channel(turn)).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) if tells_nothing(&status) && Instant::now() < until => {
                    turn = self.after(turn);
                    tokio::time::sleep(PAUSE).await;
                }
                Err(status) => return Err(status),
            }
        }
    }
}

/// Reads at its start timestamp, and keeps writes here until `commit`.
pub struct Transaction<'a> {
    gateways: &'a Gateways,
    start: u64,
    writes: Vec<CellWrite>,
}

impl Transaction<'_> {
    /// The values of one column in several rows, in the order of the rows.
    pub async fn get(
        &self,
        table: &str,
        rows: &[String],
        column: &str,
    ) -> Result<Vec<Option<Vec<u8>>>, Status> {
        let queries: Vec<RowQuery> = rows
            .iter()
            .map(|row| RowQuery {
                table: table.into(),
                row: row.clone().into_bytes(),
                columns: vec![column.into()],
                ..Default::default()
            })
            .collect();
        let request = GetRequest {
            start_timestamp: self.start,
            rows: queries,
            ..Default::default()
        };
        let told = self
            .gateways
            .anywhere(|channel| {
                let request = timed(request.clone());
                async move { GatewayServiceClient::new(channel).get(request).await }
            })
            .await?;
        let value =
            |row: crate::wire::FoundRow| row.cells.into_iter().next().map(|cell| cell.value);
        Ok(told.rows.into_iter().map(value).collect())
    }

    /// Every row of the table that has the column. If a stream breaks, or takes longer than a call
    /// may, it is continued at another gateway after the last row received, at the same snapshot.
    /// It gives up only if no row arrives for too long.
    pub async fn scan(&self, table: &str, column: &str) -> Result<Vec<(Vec<u8>, Vec<u8>)>, Status> {
        let mut found: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        let mut until = Instant::now() + PATIENCE;
        let mut turn = self.gateways.turn();
        loop {
            let before = found.len();
            let outcome = self.scan_at(turn, table, column, &mut found).await;
            if found.len() > before {
                until = Instant::now() + PATIENCE;
            }
            match outcome {
                Ok(()) => return Ok(found),
                Err(status) if tells_nothing(&status) && Instant::now() < until => {
                    turn = self.gateways.after(turn);
                    tokio::time::sleep(PAUSE).await;
                }
                Err(status) => return Err(status),
            }
        }
    }

    async fn scan_at(
        &self,
        turn: usize,
        table: &str,
        column: &str,
        found: &mut Vec<(Vec<u8>, Vec<u8>)>,
    ) -> Result<(), Status> {
        let behind = found
            .last()
            .map(|(row, _)| [row.as_slice(), b"\0"].concat());
        let request = ScanTableRequest {
            start_timestamp: self.start,
            table: table.into(),
            range: Some(RowRange {
                start: behind.unwrap_or_default(),
                end: Vec::new(),
            }),
            columns: vec![column.into()],
            ..Default::default()
        };
        let mut pages = self
            .gateways
            .client(turn)
            .scan_table(timed(request))
            .await?
            .into_inner();
        while let Some(page) = pages.message().await? {
            for row in page.rows {
                if let Some(cell) = row.cells.into_iter().next() {
                    found.push((row.row, cell.value));
                }
            }
        }
        Ok(())
    }

    pub fn put(&mut self, table: &str, row: &str, column: &str, value: Vec<u8>) {
        self.writes.push(CellWrite {
            kind: Kind::Put.into(),
            table: table.into(),
            row: row.into(),
            column: column.into(),
            value,
        });
    }

    /// Makes all writes visible atomically, or none.
    ///
    /// Without an answer, the outcome is unknown. Then the *same* commit is sent to another
    /// gateway: the start timestamp identifies it, and every gateway arrives at the same outcome.
    /// Beginning a new transaction instead might do the work twice.
    pub async fn commit(&self) -> Result<Outcome, Status> {
        self.commit_from(self.gateways.turn()).await
    }

    /// Commits at the gateway of a turn, and at the next ones if it gives no answer.
    pub async fn commit_from(&self, mut turn: usize) -> Result<Outcome, Status> {
        let request = CommitRequest {
            start_timestamp: self.start,
            writes: self.writes.clone(),
        };
        let until = Instant::now() + PATIENCE;
        loop {
            let mut gateway = self.gateways.client(turn);
            match gateway.commit(timed(request.clone())).await {
                Ok(answer) => return Ok(Outcome::Committed(answer.into_inner().commit_timestamp)),
                Err(status) if status.code() == Code::Aborted => {
                    return Ok(Outcome::Aborted(status))
                }
                Err(status) if tells_nothing(&status) && Instant::now() < until => {
                    turn = self.gateways.after(turn);
                    tokio::time::sleep(PAUSE).await;
                }
                Err(status) => return Err(status),
            }
        }
    }
}

/// Every call has a deadline: a gateway that stands still answers nothing, not even an error.
pub fn timed<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(CALL_TIME);
    request
}

/// No answer, or one that leaves the outcome open. A broken connection also looks like `UNKNOWN`.
fn tells_nothing(status: &Status) -> bool {
    matches!(
        status.code(),
        Code::Unknown
            | Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::ResourceExhausted
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_that_fail_together_leave_a_gateway_once() {
        let gateways = Gateways::new(&["localhost:1".into(), "localhost:2".into()]).unwrap();
        let dead = gateways.turn();
        for _caller in 0..4 {
            assert_eq!(gateways.after(dead), dead + 1);
        }
        assert_eq!(gateways.turn(), dead + 1);
    }
}
