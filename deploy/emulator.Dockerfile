# Google's emulator of Bigtable, as `make emulator` builds it: one program that needs nothing else.
#
#     make emulator
#     docker build -f deploy/emulator.Dockerfile -t percolator-emulator:local var/bigtable
FROM scratch
COPY emulator /emulator
USER 10001:10001
HEALTHCHECK --interval=30s --timeout=15s --start-period=10s --retries=3 \
    CMD ["/emulator", "--check", "127.0.0.1:8086"]
ENTRYPOINT ["/emulator"]
CMD ["0.0.0.0:8086"]
